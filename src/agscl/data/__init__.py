"""Where pictures come from: the catalogue, downloads, the cache, decoding, data of your own."""
