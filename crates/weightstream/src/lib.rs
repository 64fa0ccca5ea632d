//! Run models larger than their VRAM budget at the speed of the link, with the same bits out.
