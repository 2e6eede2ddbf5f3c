"""Where images come from: the catalogue of datasets, downloads, decoding, the cache."""
