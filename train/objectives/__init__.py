"""What a batch is and what its loss is, one module for each family."""
