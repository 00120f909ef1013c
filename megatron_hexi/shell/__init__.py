"""Shell scripts, read without being run: the words of the commands that they start, with places."""
