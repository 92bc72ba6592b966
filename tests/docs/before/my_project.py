from pathlib import Path

import headrace

Path("my_project").mkdir()
Path("my_project/__init__.py").touch()
