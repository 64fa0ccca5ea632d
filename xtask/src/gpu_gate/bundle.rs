//! Writes the folder that runs the GPU tests elsewhere.
//!
//! ```text
//! run.py          installs what lies here into a folder of its own and runs the tests; standard library only
//! manifest.json   what must run: tests by binary, the number of Python tests, commit, versions
//! wheel/          weightstream
//! wheels/         pytest and what it needs; packages of other libraries may be put beside them
//! bin/            test programs, and those that benches run, stripped
//! tests/          python/tests, and formats/ of the quantized weights' corpus
//! tools/          demo and bench
//! examples/       Python programs that measure starts
//! ```

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::python::Venv;
use crate::{process, workspace};

/// The most a bundle may weigh: what is carried to a GPU machine in one go.
const LIMIT: u64 = 64 << 20;
/// The programs that benches run beside Python, by crate: one page-locks a slab, for `ready`, and one reads a checkpoint, for
/// `load`. `tools/gpu/run.py` hands them over.
const PROGRAMS: [(&str, &str); 2] = [("pinned-pool", "lock_slab"), ("checkpoint", "load")];
/// What pytest needs, for machines that lack it. All are pure Python.
const PYTEST: &[&str] = &["pytest", "iniconfig", "pluggy", "packaging", "pygments"];

/// Packages of other libraries to carry.
#[derive(Debug, Clone, Copy)]
pub struct Peers<'a> {
    /// Names, as tools/bench knows them.
    pub names: &'a [String],
    /// The other machine's Python, as `3.12`.
    pub python: &'a str,
}

/// What was written.
#[derive(Debug, Serialize)]
pub struct Summary {
    folder: PathBuf,
    bytes: u64,
    rust_tests: usize,
    python_tests: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{}: {mib:.1} MiB, {} Rust tests, {} Python tests; run it with python3 {}/run.py",
            self.folder.display(),
            self.rust_tests,
            self.python_tests,
            self.folder.display()
        )
    }
}

/// What the bundle must run.
#[derive(Debug, Serialize)]
struct Manifest {
    commit: String,
    version: String,
    binaries: Vec<Binary>,
    python_tests: usize,
}

/// A test program and the tests it lists.
#[derive(Debug, Serialize)]
struct Binary {
    name: String,
    tests: Vec<String>,
}

/// Writes the bundle, in place of what is in `folder`; packages put into its `wheels` by hand stay.
pub fn write(folder: &Path, venv: &Venv, wheel: &Path, peers: &Peers<'_>) -> Result<Summary> {
    for part in ["wheel", "bin", "tests", "tools", "examples"] {
        if folder.join(part).exists() {
            fs::remove_dir_all(folder.join(part))?;
        }
        fs::create_dir_all(folder.join(part))?;
    }
    fs::create_dir_all(folder.join("wheels"))?;
    let root = workspace::root();
    copy_into(wheel, &folder.join("wheel"))?;
    let binaries = test_programs(&folder.join("bin"))?;
    bench_programs(&folder.join("bin"))?;
    copy_tree(&root.join("python/tests"), &folder.join("tests"))?;
    // Quantized weights with their numbers, which Python's tests read where the crates are not.
    copy_tree(&root.join("crates/quant-router/tests/corpus/formats"), &folder.join("tests/formats"))?;
    for tool in ["demo", "bench"] {
        copy_tree(&root.join("tools").join(tool), &folder.join("tools").join(tool))?;
    }
    copy_tree(&root.join("examples"), &folder.join("examples"))?;
    fs::copy(root.join("tools/gpu/run.py"), folder.join("run.py"))?;
    fs::copy(root.join("pyproject.toml"), folder.join("pyproject.toml"))?;
    download_pytest(venv, &folder.join("wheels"))?;
    for peer in peers.names {
        download_peer(venv, peer, peers.python, &folder.join("wheels"))?;
    }
    let metadata = workspace::metadata()?;
    let version = metadata.packages.first().map(|package| package.version.clone()).unwrap_or_default();
    let python_tests = python_tests(venv)?;
    let rust_tests = binaries.iter().map(|binary| binary.tests.len()).sum();
    let manifest = Manifest { commit: workspace::commit(), version, binaries, python_tests };
    fs::write(folder.join("manifest.json"), serde_json::to_string_pretty(&manifest)?)?;
    let bytes = weight(folder)?;
    if bytes > LIMIT {
        bail!(
            "{} weighs {bytes} bytes, more than {LIMIT}; take packages out of its wheels folder",
            folder.display()
        );
    }
    Ok(Summary { folder: folder.to_owned(), bytes, rust_tests, python_tests })
}

/// Whether an integration test needs a GPU: `cuda` and `cuda_…`, but not those against a fake driver library.
fn needs_gpu(name: &str) -> bool {
    name == "cuda" || (name.starts_with("cuda_") && name != "cuda_fake")
}

/// Builds every integration test that needs a GPU, puts the programs into `folder`, and lists their tests.
fn test_programs(folder: &Path) -> Result<Vec<Binary>> {
    let mut binaries = Vec::new();
    for package in &workspace::metadata()?.packages {
        for target in package.targets_of("test").filter(|name| needs_gpu(name)) {
            let mut cargo = workspace::cargo();
            cargo.args(["test", "--release", "--no-run", "--message-format=json-render-diagnostics"]);
            cargo.args(workspace::locked()).args(["--package", &package.name, "--test", target]);
            eprintln!("$ {}", process::display(&cargo));
            let program = executable(&process::capture(&mut cargo)?, target)?;
            let name = format!("{}-{target}", package.name);
            fs::copy(&program, folder.join(&name))?;
            let listed = process::capture(Command::new(&program).args(["--list", "--format", "terse"]))?;
            binaries.push(Binary { name, tests: listed_tests(&listed) });
        }
    }
    if binaries.is_empty() {
        bail!("no crate has an integration test whose name begins with cuda");
    }
    Ok(binaries)
}

/// Builds the programs that benches run beside Python.
fn bench_programs(folder: &Path) -> Result<()> {
    for (package, example) in PROGRAMS {
        let mut cargo = workspace::cargo();
        cargo
            .args(["build", "--release", "--message-format=json-render-diagnostics"])
            .args(workspace::locked());
        cargo.args(["--package", package, "--example", example]);
        eprintln!("$ {}", process::display(&cargo));
        let program = executable(&process::capture(&mut cargo)?, example)?;
        fs::copy(&program, folder.join(example))?;
    }
    Ok(())
}

/// Finds a test program among cargo's messages.
fn executable(messages: &str, target: &str) -> Result<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let ours = messages.filter(|message| message["target"]["name"] == target);
    let mut paths = ours.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    paths.next_back().with_context(|| format!("cargo built no program for the test {target}"))
}

/// The names in a test program's own list: `name: test` a line.
fn listed_tests(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// How many Python tests carry the marker `gpu`.
fn python_tests(venv: &Venv) -> Result<usize> {
    let mut python = venv.command();
    python
        .args(["-m", "pytest", "--collect-only", "-q", "-m", "gpu", "python/tests"])
        .env("PYTHONSAFEPATH", "1");
    let output = python.output().context("cannot start pytest")?;
    // 5 says that none was collected.
    if !output.status.success() && output.status.code() != Some(5) {
        bail!("pytest cannot collect the tests:\n{}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.contains("::")).count())
}

fn download_pytest(venv: &Venv, folder: &Path) -> Result<()> {
    let present = |name: &&&str| {
        let prefix = format!("{name}-");
        fs::read_dir(folder).is_ok_and(|mut files| {
            files.any(|file| file.is_ok_and(|file| file.file_name().to_string_lossy().starts_with(&prefix)))
        })
    };
    let missing: Vec<_> = PYTEST.iter().filter(|name| !present(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut pip = venv.command();
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest"])
        .arg(folder);
    // The versions of the environment, so that both machines run the same.
    for name in missing {
        let script = format!("import importlib.metadata as m; print('{name}==' + m.version('{name}'))");
        pip.arg(process::capture(venv.command().args(["-c", &script]))?.trim());
    }
    process::run(&mut pip)
}

/// Fetches the packages that tools/bench lists for a peer, for the other machine's Python.
fn download_peer(venv: &Venv, peer: &str, python: &str, folder: &Path) -> Result<()> {
    let list = workspace::root().join("tools/bench/peers/wheels.json");
    let lists: serde_json::Value = serde_json::from_str(&fs::read_to_string(list)?)?;
    let wheels = lists[peer].as_array().with_context(|| format!("tools/bench knows no peer {peer}"))?;
    for wheel in wheels.iter().filter_map(serde_json::Value::as_str) {
        let mut pip = venv.command();
        pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--only-binary=:all:", "--ignore-requires-python", "--implementation", "cp"]);
        pip.args(["--python-version", python]);
        for platform in [
            "manylinux_2_28_x86_64",
            "manylinux_2_27_x86_64",
            "manylinux_2_17_x86_64",
            "manylinux2014_x86_64",
        ] {
            pip.args(["--platform", platform]);
        }
        process::run(pip.arg("--dest").arg(folder).arg(wheel))?;
    }
    Ok(())
}

fn copy_into(file: &Path, folder: &Path) -> Result<()> {
    let name = file.file_name().context("a file without a name")?;
    fs::copy(file, folder.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if name == "__pycache__" {
            continue;
        }
        if path.is_dir() { copy_tree(&path, &to.join(name))? } else { copy_into(&path, to)? }
    }
    Ok(())
}

fn weight(path: &Path) -> Result<u64> {
    if !path.is_dir() {
        return Ok(fs::metadata(path)?.len());
    }
    fs::read_dir(path)?.map(|entry| weight(&entry?.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_other_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"gpu_driver\"},\"executable\":null}\n\
                        {\"target\":{\"name\":\"cuda\"},\"executable\":\"/t/cuda-1\"}\nnot json\n";
        assert_eq!(executable(messages, "cuda").unwrap(), Path::new("/t/cuda-1"));
        assert!(executable(messages, "other").is_err());
    }

    #[test]
    fn tests_that_need_a_gpu_are_known_by_name() {
        assert!(needs_gpu("cuda") && needs_gpu("cuda_memory"));
        assert!(!needs_gpu("cuda_fake") && !needs_gpu("host") && !needs_gpu("cudarc"));
    }

    #[test]
    fn listed_tests_are_those_the_program_names() {
        assert_eq!(
            listed_tests("a::b: test\nc: benchmark\nd: test\n\n2 tests, 1 benchmark\n"),
            ["a::b", "d"]
        );
    }

    #[test]
    fn trees_are_copied_without_caches_and_weighed() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(from.path().join("a/__pycache__")).unwrap();
        fs::write(from.path().join("a/b.py"), "12345").unwrap();
        fs::write(from.path().join("a/__pycache__/b.pyc"), "x").unwrap();
        copy_tree(from.path(), to.path()).unwrap();
        assert_eq!(weight(to.path()).unwrap(), 5);
    }
}
