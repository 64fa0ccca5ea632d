"""Where the time from a new process to the first frames of a whole Wan pipeline goes.

    python examples/benchmark/wan_pipeline_startup.py --model-path CHECKPOINT --output wan.json --synchronize
    python -m weightstream.startup export wan.json -o wan.trace.json      # for ui.perfetto.dev

`pipeline.create` is device, process group and all components; `first_request` is a whole tiny request with what its first use
compiles and warms up. Nothing streams, is offloaded to the CPU or compiled: the report says so, and it is checked. `--tiny`
runs anywhere.
"""

from __future__ import annotations

import sys

from launch import check, check_output, choose_device, join_group, leave_group, model_folder, parser

from weightstream import startup

PROMPT = "a cat walks on the grass, realistic style."
FRAMES, SIZE, STEPS, SEED = 9, 128, 4, 1024


def main() -> None:
    """Measures one start."""
    arguments = parser(__doc__.splitlines()[0], "the folder of a Wan 2.1 pipeline as diffusers saves it")
    arguments.add_argument("--fsdp", action="store_true", help="shard the transformer with FSDP, over this one process")
    options = arguments.parse_args()
    synchronize = startup.synchronize_cuda if options.synchronize else None
    with model_folder(options) as folder:
        with startup.collect_startup_timings(synchronize, name="wan_pipeline_startup") as timings:
            with startup.phase("import.torch"):
                import torch
            with startup.phase("import.diffusers"):
                from diffusers import WanPipeline  # noqa: F401
                from transformers import UMT5EncoderModel  # noqa: F401
            with startup.phase("import.weightstream"):
                from weightstream.loaders import PipelineComponentLoader
            timings.add_facts(
                model=folder.name,
                tiny=options.tiny,
                synchronized=options.synchronize,
                cuda_initialized_before_device_setup=torch.cuda.is_initialized(),
                request={"frames": FRAMES, "size": SIZE, "steps": STEPS, "seed": SEED, "prompt": PROMPT},
            )
            with startup.phase("pipeline.create"):
                device = choose_device(options.device)
                join_group(device)
                loader = PipelineComponentLoader(folder, device=device, fsdp=options.fsdp)
                pipeline = loader.load_pipeline()
            settings = loader.settings(pipeline.components)
            timings.add_facts(device=device, requested={"fsdp": options.fsdp}, settings=settings)
            check("whether the transformer is FSDP's", settings["fsdp"]["transformer"], options.fsdp)
            for what in ("cpu_offload", "streamed", "compiled"):
                check(what, [name for name, is_so in settings[what].items() if is_so], [])
            pipeline.set_progress_bar_config(disable=True)
            with startup.phase("first_request"):
                output = pipeline(
                    PROMPT,
                    num_frames=FRAMES,
                    height=SIZE,
                    width=SIZE,
                    num_inference_steps=STEPS,
                    generator=torch.Generator().manual_seed(SEED),
                    output_type="pt",
                ).frames
            timings.add_facts(output_shape=list(output.shape))
        leave_group()
    check_output(output, (1, FRAMES, 3, SIZE, SIZE), options.tensor_output)
    timings.save(options.output)
    sys.stdout.write(timings.report.render("table"))


if __name__ == "__main__":
    main()
