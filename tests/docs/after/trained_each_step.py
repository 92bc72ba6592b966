assert len(trained) == steps
