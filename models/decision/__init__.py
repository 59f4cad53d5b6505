"""DecisionRAG: a yes/no decision model that walks a corpus tree level by level."""
