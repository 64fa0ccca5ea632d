"""One process of the demo: `worker.py prepare|resident|streamed SPEC OUT`. Called by demo.py."""

import json
import pathlib
import statistics
import sys
import time

import torch
from memory import align_weights, link_rate, weight_bytes
from models import MODELS

# Exit statuses that come with a reason, as demo.py knows them.
NO_DEVICE, REFUSED = 3, 4


def prepare(spec, model):
    """Makes sure that the model's files are there, and says how large its weights are."""
    folder = model.prepare(spec["cache"])
    loaded, _ = model.load(folder)
    facts = {"name": model.name, "step": model.step, "weights_bytes": weight_bytes(loaded)}
    return facts | {"folder": str(folder), "cuda": torch.cuda.is_available()}, 0


def resident(spec, model):
    """Runs with all weights in the device's memory. Never imports weightstream."""
    loaded, tokenizer = model.load(spec["folder"])
    device = torch_device(spec["device"])
    if device == "cpu":
        align_weights(loaded)
    else:
        loaded.to(device)
    result = measured(model, loaded, tokenizer, device, spec["tokens"])
    if "weightstream" in sys.modules:
        raise RuntimeError("the resident run must not import weightstream")
    return result, 0


def streamed(spec, model):
    """Runs under the budget."""
    import weightstream

    loaded, tokenizer = model.load(spec["folder"])
    start = time.perf_counter()
    try:
        attachment = weightstream.attach(loaded, device=spec["device"], budget=spec["budget_bytes"])
    except weightstream.DeviceError as error:
        return {"why": str(error)}, NO_DEVICE
    except weightstream.WeightstreamError as error:
        return {"why": str(error)}, REFUSED
    attach_seconds = time.perf_counter() - start
    device = torch_device(spec["device"])
    result = measured(model, loaded, tokenizer, device, spec["tokens"], lambda: attachment.stats()["copied_bytes"])
    report = attachment.report()
    result |= {"peak_weight_bytes": report["engine"]["page_bytes_peak"], "device_name": report["device_name"]}
    attachment.detach()
    result["attach_seconds"] = attach_seconds
    result["link_bytes_per_second"] = link_rate(spec["device"])
    result["versions"] = {"weightstream": weightstream.__version__, "torch": torch.__version__}
    return result, 0


def measured(model, loaded, tokenizer, device, tokens, copied=lambda: 0):
    """Runs the model; time and copied bytes of a step are medians, the first step left out."""
    result = model.run(loaded, tokenizer, device, tokens, copied)
    result["seconds_per_step"] = statistics.median(result.pop("times"))
    result["streamed_bytes_per_step"] = int(statistics.median(result.pop("copies")))
    return result


def torch_device(device):
    """The emulated device computes where PyTorch says "cpu"."""
    return device if device.startswith("cuda") else "cpu"


def main():
    """Runs the step named and writes its result."""
    name, spec, out = sys.argv[1], json.loads(sys.argv[2]), pathlib.Path(sys.argv[3])
    torch.set_num_threads(spec["threads"])
    model = MODELS[spec["model"]]()
    result, code = {"prepare": prepare, "resident": resident, "streamed": streamed}[name](spec, model)
    out.write_text(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
