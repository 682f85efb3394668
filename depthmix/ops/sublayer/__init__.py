"""What sublayers do between their matrix products, when no gradient is wanted."""
