//! VAR and imports with the real libmlx5 on an emulated ConnectX: allocation with whatever release is installed, export and import with one
//! that has them. Where that is older, a library compiled from `stand_in/var_export.c` adds them to it.
//!
//! On another release than the system's: `WIREPATH_TEST_RDMA_LIB_DIR=DIRECTORY`.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use wirepath_memory::{RegionBuilder, passing};
use wirepath_nic_emulator::launch::{self, under_with};
use wirepath_testlab::{Need, require, skip_or_fail};
use wirepath_verbs::mlx5::Mlx5;
use wirepath_verbs::mlx5::var::{ImportedVar, Var, VarKind};
use wirepath_verbs::*;

const NIC: &str = "[[device]]\nkind = 'mlx5'\n[[device.port]]\nlink = 'loop'\n";

/// The release to test with, if it is not the system's.
fn other_release() -> Option<PathBuf> {
    std::env::var_os("WIREPATH_TEST_RDMA_LIB_DIR").map(PathBuf::from)
}

/// Where the distribution's libraries lie, and its headers; skips where there are none.
fn system_libraries() -> Option<PathBuf> {
    let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(PathBuf::from);
    let found = places.into_iter().find(|place| place.join("libmlx5.so.1").exists());
    let found = found.filter(|_| Path::new("/usr/include/infiniband/mlx5dv.h").exists());
    if found.is_none() {
        let why = "needs libmlx5 and its header (Debian: ibverbs-providers, libibverbs-dev); scripts/test installs them as root";
        skip_or_fail(file!(), line!(), why);
    }
    found
}

/// A folder with libraries that export VARs.
fn compile(system: &Path, folder: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in");
    let file = "libmlx5.so.1.27.63.0";
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-shared", "-fPIC", "-o"]).arg(folder.join(file)).arg(sources.join("var_export.c"));
    // Not libmlx5's own name: the dynamic linker would take the one for the other.
    cc.args(["-Wl,-soname,libmlx5-and-more.so", "-Wl,--no-as-needed"]).arg(system.join("libmlx5.so.1"));
    cc.arg(format!("-Wl,--version-script={}", sources.join("var_export.map").display()));
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::os::unix::fs::symlink(file, folder.join("libmlx5.so.1")).unwrap();
    std::os::unix::fs::symlink(system.join("libibverbs.so.1"), folder.join("libibverbs.so.1")).unwrap();
}

/// Runs the body of a test on an emulated NIC, with libraries that export VARs.
fn with_exports(name: &str, topology: &str, work: impl FnOnce()) {
    if std::env::var_os(LIBRARY_DIRECTORY_VARIABLE).is_some() {
        return under_with(name, topology, &[], work);
    }
    require!(Need::Program("cc"));
    let folder = tempfile::tempdir().unwrap();
    let place = match other_release() {
        Some(other) => other,
        None => {
            let Some(system) = system_libraries() else { return };
            compile(&system, folder.path());
            folder.path().to_owned()
        }
    };
    under_with(name, topology, &[(LIBRARY_DIRECTORY_VARIABLE, place.to_str().unwrap())], work);
}

fn open() -> (Context, Mlx5) {
    let mut devices = Verbs::load().unwrap().devices().unwrap();
    assert_eq!(devices.len(), 1);
    let context = devices.remove(0).open().unwrap();
    let mlx5 = Mlx5::of(&context).unwrap();
    (context, mlx5)
}

#[test]
fn pages_of_doorbells_come_and_go() {
    if system_libraries().is_none() {
        return;
    }
    under_with("pages_of_doorbells_come_and_go", NIC, &[], || {
        let (_context, mlx5) = open();
        let mut vars: Vec<Var> = (0..4).map(|_| Var::new(&mlx5, VarKind::Virtio).unwrap()).collect();
        let error = Var::new(&mlx5, VarKind::Virtio).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOSPC), "{error}");
        let pages: std::collections::HashSet<u32> = vars.iter().map(Var::page_id).collect();
        assert_eq!(pages.len(), 4);
        let page = vars[3].registers().unwrap();
        assert_eq!(page.bytes(), 4096);
        page.store64(8, 1);
        // What is freed can be had again.
        let freed = vars.remove(1).page_id();
        assert_eq!(Var::new(&mlx5, VarKind::Virtio).unwrap().page_id(), freed);
        if let Err(error) = mlx5.exports_vars() {
            let text = error.to_string();
            assert!(text.starts_with("libmlx5 ") && text.ends_with("it needs rdma-core 63.0 or newer"), "{text}");
            assert_eq!(vars[0].export().unwrap_err().to_string().split(';').next_back(), text.split(';').next_back());
            let lease = Lease::new().unwrap();
            let file = lease.file().try_clone_to_owned().unwrap();
            assert!(ImportedVar::new(&mlx5, &[], &file).unwrap_err().to_string().contains("needs rdma-core 63.0"));
        }
    });
}

#[test]
fn a_device_without_them_says_so() {
    if system_libraries().is_none() {
        return;
    }
    under_with("a_device_without_them_says_so", &NIC.replace("'mlx5'", "'mlx5'\nvar = false"), &[], || {
        let error = Var::new(&open().1, VarKind::Virtio).unwrap_err();
        assert!(error.to_string().contains("does not support this"), "{error}");
    });
}

/// What the second process is told beside the files: handles of domain and region, and a VAR.
fn invitation(domain: &ProtectionDomain, region: &MemoryRegion, var: &[u8]) -> Vec<u8> {
    [domain.handle().to_le_bytes().as_slice(), &region.handle().to_le_bytes(), &region.lkey().to_le_bytes(), var]
        .concat()
}

const SOCKET: &str = "WIREPATH_TEST_SOCKET";

#[test]
fn another_process_imports_device_domain_region_and_var() {
    const NAME: &str = "another_process_imports_device_domain_region_and_var";
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
        let files = [context.descriptor(), exported.lease];
        passing::send(&socket, &invitation(&domain, &region, &exported.bytes), &files).unwrap();
        let mut word = [0; 4];
        socket.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"seen");
        drop(var);
        socket.write_all(b"gone").unwrap();
        assert!(importer.wait().unwrap().success());
    });
    // The importer rang the page of the owner's NIC.
    if std::env::var_os(launch::TOPOLOGY).is_none() {
        let text = std::fs::read_to_string(&statistics).unwrap();
        let counters: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(counters["devices"][0]["var_doorbells"], 1, "{text}");
    }
}

/// The second process.
fn importer(mut socket: &UnixStream) {
    let (bytes, files) = passing::receive(socket).unwrap();
    let [device, lease]: [OwnedFd; 2] = files.try_into().unwrap();
    let verbs = Verbs::load().unwrap();
    // What is no device is refused.
    assert!(verbs.import_device(lease.as_fd().try_clone_to_owned().unwrap()).is_err());
    let again = device.as_fd().try_clone_to_owned().unwrap();
    let context = verbs.import_device(device).unwrap();
    let mlx5 = Mlx5::of(&context).unwrap();
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let domain = ImportedDomain::new(&context, number(0)).unwrap();
    let region = ImportedRegion::new(&domain, number(4)).unwrap();
    assert_eq!((region.lkey(), region.bytes()), (number(8), 2 << 20));
    // The kernel knows what there is; a handle of another kind is none.
    assert!(ImportedDomain::new(&context, number(4)).is_err() || number(0) == number(4));
    assert!(ImportedDomain::new(&context, 0x7777).is_err());
    assert!(ImportedRegion::new(&domain, 0x7777).is_err());
    // Objects are the owner's: none can be made here on an emulated NIC.
    assert!(ProtectionDomain::new(&context).is_err());
    let exported = &bytes[12..];
    let mut var = ImportedVar::new(&mlx5, exported, &lease).unwrap();
    var.registers().unwrap().store64(16, 0x0123_4567);
    // Random bytes, and bytes that were changed, map nothing.
    for at in 0..exported.len() {
        let mut wrong = exported.to_vec();
        wrong[at] ^= 0x5a;
        let refused = ImportedVar::new(&mlx5, &wrong, &lease);
        // The library's own handle and padding say nothing that is used.
        assert!(refused.is_err() || at >= 48, "byte {at}");
    }
    let others = Lease::new().unwrap();
    let other = others.file().try_clone_to_owned().unwrap();
    let error = ImportedVar::new(&mlx5, exported, &other).unwrap_err();
    assert!(error.to_string().contains("it is not the one of this name"), "{error}");
    socket.write_all(b"seen").unwrap();
    let mut word = [0; 4];
    socket.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"gone");
    let error = var.registers().unwrap_err();
    assert!(matches!(error, Error::Ended { .. }), "{error}");
    let error = ImportedVar::new(&mlx5, exported, &lease).unwrap_err();
    assert!(matches!(error, Error::Ended { .. }), "{error}");
    drop((var, region, domain, mlx5, context));
    // The owner's context is still there for whoever has its file.
    assert!(verbs.import_device(again).is_ok());
}

#[test]
fn foreign_bytes_as_an_exported_var_map_nothing() {
    const NAME: &str = "foreign_bytes_as_an_exported_var_map_nothing";
    with_exports(NAME, NIC, || {
        let (_context, mlx5) = open();
        let var = Var::new(&mlx5, VarKind::Virtio).unwrap();
        let exported = var.export().unwrap();
        let lease = exported.lease.try_clone_to_owned().unwrap();
        let maps =
            || std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|map| map.contains("uverbs")).count();
        let (before, whole) = (maps(), &exported.bytes);
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let refused = |bytes: &[u8]| assert!(ImportedVar::new(&mlx5, bytes, &lease).is_err(), "{bytes:x?}");
        // Cut short, too long, of nothing but noise, and right as far as the head goes.
        (0..whole.len()).for_each(|cut| refused(&whole[..cut]));
        (1..300).for_each(|more| refused(&[whole.as_slice(), &vec![0; more]].concat()));
        for round in 0..400 {
            let mut bytes: Vec<u8> = (0..round % 400).map(|_| next()).collect();
            refused(&bytes);
            let head = whole.len().min(48).min(bytes.len());
            bytes[..head].copy_from_slice(&whole[..head]);
            refused(&bytes);
        }
        // One byte wrong: refused, or something of which nothing depends on it.
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                match ImportedVar::new(&mlx5, &bytes, &lease) {
                    Err(_) => {}
                    Ok(same) => assert!(at >= 48 && same.page_id() == var.page_id(), "byte {at}, bit {bit}"),
                }
            }
        }
        assert_eq!(maps(), before);
        let mut imported = ImportedVar::new(&mlx5, whole, &lease).unwrap();
        assert_eq!(maps(), before, "not before it is asked for");
        imported.registers().unwrap();
        assert_eq!(maps(), before + 1);
    });
}
