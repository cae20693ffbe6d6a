"""Sources: what watches a job and feeds the policy; a source that fails is an event itself."""
