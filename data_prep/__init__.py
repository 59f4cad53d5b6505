"""What a corpus, a query, a judgement and a training row is. Imports no torch."""
