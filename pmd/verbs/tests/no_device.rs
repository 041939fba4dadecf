//! What a machine without an RDMA device, or without the libraries, is told.

use std::process::Command;

use wirepath_testlab::skip_or_fail;
use wirepath_verbs::{Error, LIBRARY_DIRECTORY_VARIABLE, LoadError, Verbs};

const CASE: &str = "WIREPATH_TEST_VERBS_CASE";

/// Runs the test `name` of this file again in a new process with these variables; there, returns `true`.
fn in_own_process(name: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var(CASE).is_ok_and(|case| case == name) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CASE, name).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    false
}

#[test]
fn without_libraries_loading_says_what_to_install() {
    let empty = tempfile::tempdir().unwrap();
    let directory = empty.path().to_str().unwrap();
    if !in_own_process("without_libraries_loading_says_what_to_install", &[(LIBRARY_DIRECTORY_VARIABLE, directory)]) {
        return;
    }
    let error = Verbs::load().unwrap_err();
    assert!(matches!(error, Error::Library(LoadError::Library { library: "libibverbs", .. })), "{error}");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
}

#[test]
fn without_devices_the_list_is_empty() {
    // An empty tree of sysfs has no device, whatever the machine has; a device that netlink tells of is still found.
    let empty = tempfile::tempdir().unwrap();
    let tree = empty.path().to_str().unwrap();
    if !in_own_process("without_devices_the_list_is_empty", &[("SYSFS_PATH", tree), (LIBRARY_DIRECTORY_VARIABLE, "")]) {
        return;
    }
    let verbs = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return skip_or_fail(file!(), line!(), &error.to_string()),
    };
    assert!(verbs.libraries().iter().any(|library| library.name == "libibverbs"));
    let devices = verbs.devices().unwrap();
    if devices.is_empty() {
        return;
    }
    // This machine has RDMA devices: they have names at least.
    assert!(devices.iter().all(|device| !device.name().is_empty()));
}
