"""Networks, constraints and the inference loops of each family."""
