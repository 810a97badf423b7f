"""`check`: what is wrong with a problem, and what to do about it, before a solver meets it."""

from aipod.diagnose._check import check as check
from aipod.diagnose._findings import Finding as Finding
from aipod.diagnose._findings import LowerCurvature as LowerCurvature
from aipod.diagnose._findings import Report as Report
from aipod.diagnose._findings import Spectrum as Spectrum
