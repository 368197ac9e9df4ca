"""What a compression says of itself: as data, as a page, and in whole-model measures."""
