"""The command line: from words, variables and files to a request, or to one of the commands."""
