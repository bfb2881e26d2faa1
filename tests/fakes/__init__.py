"""Stand-ins for what a test cannot have or provoke for real."""
