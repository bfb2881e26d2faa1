"""The experiments of `./just bench NAME`, one module each: setup, measurement and output. Only the command line imports them."""
