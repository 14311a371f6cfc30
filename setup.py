"""Installs the package described in settings.ini; nbdev reads the same file."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read(Path(__file__).resolve().parent / "settings.ini", encoding="utf-8")
s = config["DEFAULT"]

setup(
    name=s["lib_name"],
    version=s["version"],
    description=s["description"],
    author=s["author"],
    author_email=s["author_email"],
    license="Apache-2.0",
    python_requires=f">={s['min_python']},<3.13",
    packages=find_packages(include=[s["lib_path"], f"{s['lib_path']}.*"]),
    package_data={s["lib_path"]: ["profiles/*.yaml", "pretrained/*", "texts/*"]},
    install_requires=s["requirements"].split(),
    extras_require={extra: s[f"{extra}_requirements"].split() for extra in ("dev", "docs")},
    entry_points={
        "console_scripts": s["console_scripts"].split(),
        "nbdev": [f"{s['lib_path']}={s['lib_path']}._modidx:d"],
    },
)
