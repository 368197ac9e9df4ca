"""Circuit discovery: search for a subset of edges, paths or terms that preserves the loss on a task."""
