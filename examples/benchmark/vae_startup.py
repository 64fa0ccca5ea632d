"""Where the time from a new process to a VAE's first decoded frames goes.

    python examples/benchmark/vae_startup.py --model-path CHECKPOINT/vae --output vae.json --synchronize
    python -m weightstream.startup show vae.json

Imports, device and process group, loading and the first decode are phases of their own. Each run is one start: compare
several processes with `python -m weightstream.startup stats`. `--tiny` runs anywhere.
"""

from __future__ import annotations

import sys

from launch import check_output, choose_device, join_group, leave_group, model_folder, parser

from weightstream import startup

SEED = 1024
LATENT_FRAMES, LATENT_SIZE = 3, 16
"""Of the latent that is decoded: 9 frames of 128 x 128."""


def main() -> None:
    """Measures one start."""
    options = parser(__doc__.splitlines()[0], "the folder of a Wan VAE as diffusers saves it").parse_args()
    synchronize = startup.synchronize_cuda if options.synchronize else None
    with model_folder(options, "vae") as folder:
        with startup.collect_startup_timings(synchronize, name="vae_startup") as timings:
            with startup.phase("import.torch"):
                import torch
            with startup.phase("import.diffusers"):
                from diffusers import AutoencoderKLWan  # noqa: F401
            with startup.phase("import.weightstream"):
                from weightstream.loaders import VAELoader
            timings.add_facts(
                model=folder.name,
                tiny=options.tiny,
                synchronized=options.synchronize,
                # Imports may have made a context; then their time includes it.
                cuda_initialized_before_device_setup=torch.cuda.is_initialized(),
            )
            with startup.phase("device_setup"):
                device = choose_device(options.device)
                join_group(device)
            with startup.phase("component.vae"):
                vae = VAELoader(device, torch.float32).load(folder)
            with startup.phase("first_decode"), torch.inference_mode():
                generator = torch.Generator().manual_seed(SEED)
                shape = (1, vae.config.z_dim, LATENT_FRAMES, LATENT_SIZE, LATENT_SIZE)
                output = vae.decode(torch.randn(shape, generator=generator).to(device), return_dict=False)[0]
            timings.add_facts(device=device, output_shape=list(output.shape))
        leave_group()
    check_output(output, (1, 3, 9, 128, 128), options.tensor_output)
    timings.save(options.output)
    sys.stdout.write(timings.report.render("table"))


if __name__ == "__main__":
    main()
