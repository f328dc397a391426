"""From raw files to a `Dataset`: sources, readers, filters, splits, and generated data."""
