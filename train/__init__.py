"""The one training loop, its objectives, checkpoints and export."""
