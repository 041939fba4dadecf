//! Tests on a machine without an RDMA device or without the libraries.

use wirepath_testlab::skip_or_fail;
use wirepath_verbs::{Error, LIBRARY_DIRECTORY_VARIABLE, LoadError, Verbs};

use super::common::in_own_process;

#[test]
fn missing_libraries_error_says_what_to_install() {
    let empty = tempfile::tempdir().unwrap();
    let directory = empty.path().to_str().unwrap();
    if !in_own_process(
        "no_device::missing_libraries_error_says_what_to_install",
        &[(LIBRARY_DIRECTORY_VARIABLE, directory)],
    ) {
        return;
    }
    let error = Verbs::load().unwrap_err();
    assert!(matches!(error, Error::Library(LoadError::Library { library: "libibverbs", .. })), "{error}");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
}

#[test]
fn without_devices_the_list_is_empty() {
    // An empty sysfs tree has no device. Devices of the machine that netlink reports are still found.
    let empty = tempfile::tempdir().unwrap();
    let tree = empty.path().to_str().unwrap();
    if !in_own_process(
        "no_device::without_devices_the_list_is_empty",
        &[("SYSFS_PATH", tree), (LIBRARY_DIRECTORY_VARIABLE, "")],
    ) {
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
    // This machine has RDMA devices, and each has a name.
    assert!(devices.iter().all(|device| !device.name().is_empty()));
}
