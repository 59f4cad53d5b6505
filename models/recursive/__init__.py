"""RDR: one instruction-conditioned encoder of states, recursive search, and readouts over all states."""
