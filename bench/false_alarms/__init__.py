"""False alarms of A/B comparisons: stored A/A rounds split again and again, and live A/A runs."""
