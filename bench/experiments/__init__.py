"""What `./just bench NAME` runs, one module per experiment: sets it up, runs it, prints it. Only the command line knows them."""
