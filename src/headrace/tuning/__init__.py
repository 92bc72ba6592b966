"""Search for a loader's best settings: arithmetic over measurements that somebody else takes."""
