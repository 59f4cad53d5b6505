"""YAML values, grouped by component; read by `retrail.scripts`."""
