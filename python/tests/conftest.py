"""One thread for every test: results are then the same on every machine, and two torch processes do not fight."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
