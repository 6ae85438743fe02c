"""One correctness suite over every backend; it knows no framework beyond carrying arrays to and from it."""
