"""From images to numbers: features, their statistics, and the scores made of them."""

SCHEMA = 3  # of the report
DEFAULT_BATCH = 32  # images in one forward pass of an extractor; on a CPU faster than larger ones
