"""Methods in the loops of other libraries, one file each; each needs the extra of its name."""
