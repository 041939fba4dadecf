//! Loading of the libraries. Each case runs in a process of its own, because libraries are loaded once per
//! process.
//!
//! For another release than the system's set `WIREPATH_TEST_RDMA_LIB_DIR=DIRECTORY`.

use std::path::{Path, PathBuf};
use std::process::Command;

use rdma_core_sys::{LIBRARY_DIRECTORY_VARIABLE, LoadError, RdmaCore, Search};
use wirepath_testlab::skip_or_fail;

const CASE: &str = "WIREPATH_TEST_LOAD_CASE";

/// Returns the directory of another release, if one is set.
fn other_release() -> Option<PathBuf> {
    std::env::var_os("WIREPATH_TEST_RDMA_LIB_DIR").map(PathBuf::from)
}

/// Runs the test `name` of this file in a new process, and returns `true` in that process.
fn in_own_process(name: &str, directory: Option<&Path>) -> bool {
    if std::env::var(CASE).is_ok_and(|case| case == name) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CASE, name).env_remove(LIBRARY_DIRECTORY_VARIABLE);
    if let Some(directory) = directory {
        command.env(LIBRARY_DIRECTORY_VARIABLE, directory);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    false
}

/// Returns the directory of the distribution's libraries. Skips the test if there is none.
fn system_libraries() -> Option<PathBuf> {
    let directories = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let found = directories.map(PathBuf::from).into_iter().find(|directory| directory.join("libibverbs.so.1").exists());
    if found.is_none() {
        skip_or_fail(
            file!(),
            line!(),
            "needs libibverbs and its providers (Debian: ibverbs-providers); scripts/test installs them as root",
        );
    }
    found
}

#[test]
fn system_libraries_have_every_function_of_their_release() {
    if system_libraries().is_none()
        || !in_own_process("system_libraries_have_every_function_of_their_release", other_release().as_deref())
    {
        return;
    }
    let libraries = RdmaCore::load(&Search::from_environment()).unwrap();
    let version =
        libraries.ibverbs().library().version.expect("the file name of a distribution's library has the version");
    for library in libraries.libraries() {
        assert_eq!(library.version, Some(version), "{library}");
    }
    let mut symbols = libraries.ibverbs().symbols();
    symbols.extend(libraries.mana().unwrap().symbols());
    symbols.extend(libraries.mlx5().unwrap().symbols());
    for symbol in symbols {
        assert_eq!(symbol.present, symbol.since <= version.major, "{symbol:?} in {version}");
    }
    // A second load returns the first result.
    assert!(std::ptr::eq(libraries, RdmaCore::load(&Search::from_environment()).unwrap()));
    let elsewhere = RdmaCore::load(&Search::Directory("/nonexistent".into())).unwrap_err();
    assert!(matches!(elsewhere, LoadError::LoadedFromElsewhere { .. }), "{elsewhere}");
}

#[test]
fn a_missing_function_gives_a_typed_error() {
    if system_libraries().is_none()
        || !in_own_process("a_missing_function_gives_a_typed_error", other_release().as_deref())
    {
        return;
    }
    let libraries = RdmaCore::load(&Search::from_environment()).unwrap();
    let mlx5 = libraries.mlx5().unwrap();
    let found = mlx5.library().version.unwrap();
    match mlx5.mlx5dv_var_export() {
        Ok(_) => assert!(found.major >= 63),
        Err(missing) => {
            assert_eq!((missing.library, missing.symbol, missing.needed), ("libmlx5", "mlx5dv_var_export", 63));
            assert_eq!(missing.found, Some(found));
            let text = missing.to_string();
            assert!(text.starts_with(&format!("libmlx5 {found} (")), "{text}");
            assert!(text.ends_with("has no mlx5dv_var_export; it needs rdma-core 63.0 or newer"), "{text}");
        }
    }
    // No release has libhbl.
    let hbl = libraries.hbl().unwrap_err().to_string();
    assert!(hbl.starts_with("libhbl cannot be loaded") && hbl.contains(LIBRARY_DIRECTORY_VARIABLE), "{hbl}");
}

#[test]
fn missing_libraries_give_one_error_and_allow_a_retry() {
    let empty = tempfile::tempdir().unwrap();
    if !in_own_process("missing_libraries_give_one_error_and_allow_a_retry", Some(empty.path())) {
        return;
    }
    let search = Search::from_environment();
    assert!(matches!(&search, Search::Directory(_)));
    let error = RdmaCore::load(&search).unwrap_err();
    assert!(matches!(error, LoadError::Library { library: "libibverbs", .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("libibverbs cannot be loaded, looked for in ") && text.contains("No such file"), "{text}");
    // A failed attempt can be repeated.
    if system_libraries().is_some() {
        RdmaCore::load(&Search::System).unwrap();
    }
}

#[test]
fn a_directory_is_searched_alone_with_its_providers() {
    let Some(system) = system_libraries() else { return };
    let directory = tempfile::tempdir().unwrap();
    for name in ["libibverbs.so.1", "libmana.so.1"] {
        // The file name carries the version, as in the `lib` directory of a release.
        let file = system.join(name).canonicalize().unwrap();
        let copy = directory.path().join(file.file_name().unwrap());
        if !copy.exists() {
            std::fs::copy(&file, &copy).unwrap();
        }
        let link = directory.path().join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(copy, link).unwrap();
        }
    }
    let case = "a_directory_is_searched_alone_with_its_providers";
    let given = std::env::var_os(CASE).is_some();
    if !in_own_process(case, (!given).then_some(directory.path())) {
        return;
    }
    let Search::Directory(path) = Search::from_environment() else { panic!("no directory") };
    let libraries = RdmaCore::load(&Search::Directory(path.clone())).unwrap();
    let path = path.canonicalize().unwrap();
    for library in [libraries.ibverbs().library(), libraries.mana().unwrap().library()] {
        assert!(library.path.starts_with(&path), "{library}");
    }
    // No other directory is searched.
    let mlx5 = libraries.mlx5().unwrap_err();
    assert!(matches!(&mlx5, LoadError::Library { library: "libmlx5", search: Search::Directory(_), .. }), "{mlx5}");
    // The process has one libibverbs, and libmana is bound to it.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut copies: Vec<&str> = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).collect();
    copies.retain(|path| path.contains("libibverbs.so"));
    copies.dedup();
    assert_eq!(copies.len(), 1, "{copies:?}");
}
