"""ReFrame's configuration of the system that `hpcai accept` describes (hpcai/cli/accept/system.py)."""

import json
import os
from pathlib import Path

site_configuration = json.loads(Path(os.environ["HPCAI_ACCEPTANCE"]).read_text())["reframe"]
