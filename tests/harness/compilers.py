"""The C++ compiler of this machine, if there is one."""

import shutil

GXX = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
