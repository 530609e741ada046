"""What pyproject.toml cannot say: a wheel also holds apps, data_prep and slurm, as hpcai/suite, out of which `hpcai run` runs them,
and the page whose files `hpcai new` writes.

They are no top-level packages there: `apps` would be everybody's name. An editable install finds them in the checkout.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SUITE = ("apps", "data_prep", "slurm")


class BuildWithSuite(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SUITE:
            target = Path(self.build_lib, "hpcai/suite", name)
            shutil.rmtree(target, ignore_errors=True)  # what an earlier build left
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        page = Path(self.build_lib, "hpcai/suite/docs/new_model.md")
        page.parent.mkdir(exist_ok=True)
        shutil.copy("docs/new_model.md", page)


setup(cmdclass={"build_py": BuildWithSuite})
