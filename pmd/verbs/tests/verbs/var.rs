//! Tests of VARs and imports with the real libmlx5 on an emulated ConnectX.
//!
//! Allocation works with any installed release. Export and import need a newer one: where the installed release is
//! older, a library compiled from `stubs/var_export.c` adds them. `WIREPATH_TEST_RDMA_LIB_DIR=DIRECTORY` selects
//! another release than the system's.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use wirepath_memory::{RegionBuilder, fd_passing};
use wirepath_nic_emulator::launch::{self, run_test_with_env};
use wirepath_testlab::{Requirement, require, skip_or_fail};
use wirepath_verbs::mlx5::Mlx5;
use wirepath_verbs::mlx5::var::{ImportedVar, Var, VarKind};
use wirepath_verbs::*;

const NIC: &str = "[[device]]\nkind = 'mlx5'\n[[device.port]]\nlink = 'loop'\n";

/// Returns the directory of the release to test with, if it is not the system's.
fn other_release() -> Option<PathBuf> {
    std::env::var_os("WIREPATH_TEST_RDMA_LIB_DIR").map(PathBuf::from)
}

/// Returns the directory of the distribution's libraries. Skips the test if they or their headers are missing.
fn system_libraries() -> Option<PathBuf> {
    let directories = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(PathBuf::from);
    let found = directories.into_iter().find(|directory| directory.join("libmlx5.so.1").exists());
    let found = found.filter(|_| Path::new("/usr/include/infiniband/mlx5dv.h").exists());
    if found.is_none() {
        let why = "needs libmlx5 and its header (Debian: ibverbs-providers, libibverbs-dev); \
                   scripts/test installs them as root";
        skip_or_fail(file!(), line!(), why);
    }
    found
}

/// Compiles libraries that export VARs to `folder`.
fn compile(system: &Path, folder: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/verbs/stubs");
    let file = "libmlx5.so.1.27.63.0";
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-shared", "-fPIC", "-o"]).arg(folder.join(file)).arg(sources.join("var_export.c"));
    // The name differs from libmlx5's own: otherwise the dynamic linker would use one for the other.
    cc.args(["-Wl,-soname,libmlx5-and-more.so", "-Wl,--no-as-needed"]).arg(system.join("libmlx5.so.1"));
    cc.arg(format!("-Wl,--version-script={}", sources.join("var_export.map").display()));
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::os::unix::fs::symlink(file, folder.join("libmlx5.so.1")).unwrap();
    std::os::unix::fs::symlink(system.join("libibverbs.so.1"), folder.join("libibverbs.so.1")).unwrap();
}

/// Runs the body of a test on an emulated NIC with libraries that export VARs.
fn with_exports(name: &str, topology: &str, work: impl FnOnce()) {
    if std::env::var_os(LIBRARY_DIRECTORY_VARIABLE).is_some() {
        return run_test_with_env(name, topology, &[], work);
    }
    require!(Requirement::Program("cc"));
    let folder = tempfile::tempdir().unwrap();
    let libraries = match other_release() {
        Some(other) => other,
        None => {
            let Some(system) = system_libraries() else { return };
            compile(&system, folder.path());
            folder.path().to_owned()
        }
    };
    run_test_with_env(name, topology, &[(LIBRARY_DIRECTORY_VARIABLE, libraries.to_str().unwrap())], work);
}

fn open() -> (Context, Mlx5) {
    let context = super::common::open();
    let mlx5 = Mlx5::from_context(&context).unwrap();
    (context, mlx5)
}

#[test]
fn var_pages_are_allocated_and_freed() {
    if system_libraries().is_none() {
        return;
    }
    run_test_with_env("var::var_pages_are_allocated_and_freed", NIC, &[], || {
        let (_context, mlx5) = open();
        let mut vars: Vec<Var> = (0..4).map(|_| Var::new(&mlx5, VarKind::Virtio).unwrap()).collect();
        let error = Var::new(&mlx5, VarKind::Virtio).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOSPC), "{error}");
        let pages: std::collections::HashSet<u32> = vars.iter().map(Var::page_id).collect();
        assert_eq!(pages.len(), 4);
        let page = vars[3].registers().unwrap();
        assert_eq!(page.bytes(), 4096);
        page.store64(8, 1);
        // A freed page can be allocated again.
        let freed = vars.remove(1).page_id();
        assert_eq!(Var::new(&mlx5, VarKind::Virtio).unwrap().page_id(), freed);
        if let Err(error) = mlx5.check_var_export_support() {
            let text = error.to_string();
            assert!(text.starts_with("libmlx5 ") && text.ends_with("it needs rdma-core 63.0 or newer"), "{text}");
            assert_eq!(vars[0].export().unwrap_err().to_string().split(';').next_back(), text.split(';').next_back());
            let liveness = Liveness::new().unwrap();
            let file = liveness.file().try_clone_to_owned().unwrap();
            assert!(ImportedVar::new(&mlx5, &[], &file).unwrap_err().to_string().contains("needs rdma-core 63.0"));
        }
    });
}

#[test]
fn device_without_var_reports_not_supported() {
    if system_libraries().is_none() {
        return;
    }
    run_test_with_env(
        "var::device_without_var_reports_not_supported",
        &NIC.replace("'mlx5'", "'mlx5'\nvar = false"),
        &[],
        || {
            let error = Var::new(&open().1, VarKind::Virtio).unwrap_err();
            assert!(error.to_string().contains("does not support this"), "{error}");
        },
    );
}

/// Returns the message for the importing process: handles of domain and region, the local key, and an exported VAR.
fn import_message(domain: &ProtectionDomain, region: &MemoryRegion, var: &[u8]) -> Vec<u8> {
    [domain.handle().to_le_bytes().as_slice(), &region.handle().to_le_bytes(), &region.lkey().to_le_bytes(), var]
        .concat()
}

const SOCKET: &str = "WIREPATH_TEST_SOCKET";

#[test]
fn another_process_imports_device_domain_region_and_var() {
    const NAME: &str = "var::another_process_imports_device_domain_region_and_var";
    if let Some(path) = std::env::var_os(SOCKET) {
        return importer(&UnixStream::connect(path).unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    let statistics = folder.path().join("statistics");
    let topology = format!("stats = '{}'\n{NIC}", statistics.display());
    with_exports(NAME, &topology, || {
        let (context, mlx5) = open();
        let domain = ProtectionDomain::new(&context).unwrap();
        let packets = Arc::new(RegionBuilder::new(1 << 20).shared().map().unwrap());
        let region = MemoryRegion::register(&domain, &packets, Access::PACKETS).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut importer = Command::new(std::env::current_exe().unwrap());
        let mut importer = importer.args([NAME, "--exact", "--nocapture"]).env(SOCKET, &path).spawn().unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        let var = Var::new(&mlx5, VarKind::Virtio).unwrap();
        let exported = var.export().unwrap();
        let files = [context.cmd_fd(), exported.liveness];
        fd_passing::send(&socket, &import_message(&domain, &region, &exported.bytes), &files).unwrap();
        let mut word = [0; 4];
        socket.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"seen");
        drop(var);
        socket.write_all(b"free").unwrap();
        assert!(importer.wait().unwrap().success());
    });
    // The importer's doorbell reached the owner's NIC.
    if std::env::var_os(launch::TOPOLOGY).is_none() {
        let text = std::fs::read_to_string(&statistics).unwrap();
        let counters: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(counters["devices"][0]["var_doorbells"], 1, "{text}");
    }
}

/// Runs in the importing process.
fn importer(mut socket: &UnixStream) {
    let (bytes, files) = fd_passing::receive(socket).unwrap();
    let [device, liveness]: [OwnedFd; 2] = files.try_into().unwrap();
    let verbs = Verbs::load().unwrap();
    // A file that is not a device is rejected.
    assert!(verbs.import_device(liveness.as_fd().try_clone_to_owned().unwrap()).is_err());
    let again = device.as_fd().try_clone_to_owned().unwrap();
    let context = verbs.import_device(device).unwrap();
    let mlx5 = Mlx5::from_context(&context).unwrap();
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let domain = ImportedDomain::new(&context, number(0)).unwrap();
    let region = ImportedRegion::new(&domain, number(4)).unwrap();
    assert_eq!((region.lkey(), region.bytes()), (number(8), 2 << 20));
    // The kernel rejects unknown handles and handles of other objects.
    assert!(ImportedDomain::new(&context, number(4)).is_err() || number(0) == number(4));
    assert!(ImportedDomain::new(&context, 0x7777).is_err());
    assert!(ImportedRegion::new(&domain, 0x7777).is_err());
    // On an emulated NIC, importers cannot create objects.
    assert!(ProtectionDomain::new(&context).is_err());
    let exported = &bytes[12..];
    let mut var = ImportedVar::new(&mlx5, exported, &liveness).unwrap();
    var.registers().unwrap().store64(16, 0x0123_4567);
    // Modified bytes are rejected.
    for at in 0..exported.len() {
        let mut wrong = exported.to_vec();
        wrong[at] ^= 0x5a;
        let refused = ImportedVar::new(&mlx5, &wrong, &liveness);
        // The library's handle and padding are not used.
        assert!(refused.is_err() || at >= 48, "byte {at}");
    }
    let others = Liveness::new().unwrap();
    let other = others.file().try_clone_to_owned().unwrap();
    let error = ImportedVar::new(&mlx5, exported, &other).unwrap_err();
    assert!(error.to_string().contains("it has another name"), "{error}");
    socket.write_all(b"seen").unwrap();
    let mut word = [0; 4];
    socket.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"free");
    let error = var.registers().unwrap_err();
    assert!(matches!(error, Error::FreedByOwner { .. }), "{error}");
    let error = ImportedVar::new(&mlx5, exported, &liveness).unwrap_err();
    assert!(matches!(error, Error::FreedByOwner { .. }), "{error}");
    drop((var, region, domain, mlx5, context));
    // The owner's context exists as long as a process has its file.
    assert!(verbs.import_device(again).is_ok());
}

#[test]
fn malformed_var_export_maps_nothing() {
    const NAME: &str = "var::malformed_var_export_maps_nothing";
    with_exports(NAME, NIC, || {
        let (_context, mlx5) = open();
        let var = Var::new(&mlx5, VarKind::Virtio).unwrap();
        let exported = var.export().unwrap();
        let liveness = exported.liveness.try_clone_to_owned().unwrap();
        let maps =
            || std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|map| map.contains("uverbs")).count();
        let (before, whole) = (maps(), &exported.bytes);
        let mut random = fastrand::Rng::with_seed(1);
        let refused = |bytes: &[u8]| assert!(ImportedVar::new(&mlx5, bytes, &liveness).is_err(), "{bytes:x?}");
        // Truncated, too long, random, and random after a valid header.
        (0..whole.len()).for_each(|cut| refused(&whole[..cut]));
        (1..300).for_each(|more| refused(&[whole.as_slice(), &vec![0; more]].concat()));
        for round in 0..400 {
            let mut bytes: Vec<u8> = (0..round % 400).map(|_| random.u8(..)).collect();
            refused(&bytes);
            let head = whole.len().min(48).min(bytes.len());
            bytes[..head].copy_from_slice(&whole[..head]);
            refused(&bytes);
        }
        // A single wrong bit is rejected, or is in a field that is not used.
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                match ImportedVar::new(&mlx5, &bytes, &liveness) {
                    Err(_) => {}
                    Ok(same) => assert!(at >= 48 && same.page_id() == var.page_id(), "byte {at}, bit {bit}"),
                }
            }
        }
        assert_eq!(maps(), before);
        let mut imported = ImportedVar::new(&mlx5, whole, &liveness).unwrap();
        assert_eq!(maps(), before, "the import does not map the page");
        imported.registers().unwrap();
        assert_eq!(maps(), before + 1);
    });
}
