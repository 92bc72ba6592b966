assert list(self.samples) == scan(root)
