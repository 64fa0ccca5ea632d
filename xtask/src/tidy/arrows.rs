//! Which crate may use which: arrows point down only, and one crate alone knows CUDA.

use super::{Finding, SourceFile};
use crate::workspace::{Metadata, Package};

/// Every crate, and the crates of this workspace it may use. Lower crates come first.
const ARROWS: &[(&str, &[&str])] = &[
    ("fuzz-replay", &[]),
    ("gpu-driver", &[]),
    ("vmm-alloc", &["gpu-driver"]),
    ("startup-timing", &["fuzz-replay"]),
    ("checkpoint", &["fuzz-replay"]),
    ("quant-router", &["fuzz-replay", "checkpoint"]),
    ("quant-kernels", &["gpu-driver", "checkpoint", "quant-router"]),
    ("lora-runtime", &["fuzz-replay", "checkpoint"]),
    ("pinned-pool", &["gpu-driver", "vmm-alloc"]),
    ("offload-core", &["gpu-driver", "vmm-alloc", "pinned-pool"]),
    ("profile-store", &["fuzz-replay"]),
    (
        "weightstream",
        &["gpu-driver", "vmm-alloc", "startup-timing", "checkpoint", "pinned-pool", "offload-core"],
    ),
    (
        "py-bindings",
        &[
            "gpu-driver",
            "startup-timing",
            "checkpoint",
            "quant-router",
            "quant-kernels",
            "lora-runtime",
            "weightstream",
            "profile-store",
        ],
    ),
    ("xtask", &[]),
];
/// The crate that may name the CUDA bindings.
const CUDA: &str = "gpu-driver";
/// The CUDA bindings.
const BINDINGS: &str = "cudarc";

/// Checks manifests and sources.
pub fn check(metadata: &Metadata, files: &[SourceFile]) -> Vec<Finding> {
    let mut found: Vec<_> = metadata.packages.iter().flat_map(check_package).collect();
    found.extend(files.iter().filter(|file| file.is("rs")).flat_map(check_source));
    found
}

fn manifest(package: &Package) -> String {
    if package.name == "xtask" {
        "xtask/Cargo.toml".into()
    } else {
        format!("crates/{}/Cargo.toml", package.name)
    }
}

fn check_package(package: &Package) -> Vec<Finding> {
    let path = manifest(package);
    let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == package.name) else {
        return vec![Finding::new(
            &path,
            0,
            "this crate is not in the table of arrows in xtask/src/tidy/arrows.rs",
        )];
    };
    let mut found = Vec::new();
    for dependency in &package.dependencies {
        let own = dependency.path.is_some();
        if own && !allowed.contains(&dependency.name.as_str()) {
            let message = format!("{} may not use {}; arrows point down only", package.name, dependency.name);
            found.push(Finding::new(&path, 0, message));
        }
        if dependency.name == BINDINGS && package.name != CUDA {
            found.push(Finding::new(&path, 0, format!("only {CUDA} may name {BINDINGS}")));
        }
    }
    found
}

fn check_source(file: &SourceFile) -> Vec<Finding> {
    if file.package() == Some(CUDA) {
        return Vec::new();
    }
    let path = format!("{BINDINGS}::");
    let lines =
        file.text.lines().enumerate().filter(|(_, line)| line.contains(&path) && !line.contains("format!"));
    lines.map(|(i, _)| Finding::new(&file.path, i + 1, format!("only {CUDA} may name {BINDINGS}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;
    use crate::workspace::Dependency;

    fn package(name: &str, dependencies: &[(&str, bool)]) -> Metadata {
        let dependency =
            |&(name, own): &(&str, bool)| Dependency { name: name.into(), path: own.then(|| "x".into()) };
        let dependencies = dependencies.iter().map(dependency).collect();
        let package =
            Package { name: name.into(), version: "0.1.0".into(), dependencies, targets: Vec::new() };
        Metadata { packages: vec![package] }
    }

    #[test]
    fn arrows_point_down_only() {
        assert!(check(&package("vmm-alloc", &[("gpu-driver", true), ("thiserror", false)]), &[]).is_empty());
        let found = check(&package("vmm-alloc", &[("offload-core", true)]), &[]);
        assert!(found[0].message.contains("may not use offload-core"), "{found:?}");
        assert!(check(&package("new-crate", &[]), &[])[0].message.contains("not in the table"));
    }

    #[test]
    fn the_table_itself_points_down() {
        for (index, (name, allowed)) in ARROWS.iter().enumerate() {
            for lower in *allowed {
                assert!(ARROWS[..index].iter().any(|(n, _)| n == lower), "{name} -> {lower}");
            }
        }
    }

    #[test]
    fn one_crate_alone_knows_cuda() {
        assert!(check(&package("gpu-driver", &[("cudarc", false)]), &[]).is_empty());
        assert_eq!(check(&package("vmm-alloc", &[("cudarc", false)]), &[]).len(), 1);
        let none = package("gpu-driver", &[]);
        let text = format!("use {BINDINGS}::driver;\n");
        assert_eq!(check(&none, &[fixture("crates/vmm-alloc/src/lib.rs", &text)]).len(), 1);
        assert!(check(&none, &[fixture("crates/gpu-driver/src/cuda.rs", &text)]).is_empty());
    }
}
