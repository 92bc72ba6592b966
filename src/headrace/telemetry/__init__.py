"""What a loader can tell about itself."""
