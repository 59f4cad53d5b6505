"""One reader for each family of data sets; every error names the file and the line or key."""
