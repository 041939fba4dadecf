//! Creation of the emulator, its reset after `fork`, and its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use wirepath_nic_emulator::launch;
use wirepath_nic_emulator::topology::{Doorbells, Topology};
use wirepath_nic_emulator::{Emulator, Log};

use crate::process::{self, Nic, Process, existing, set_nic};
use crate::{remote_doorbells, thread, traps};

/// True if there is no topology, or an invalid one.
static DISABLED: AtomicBool = AtomicBool::new(false);
static INIT_LOCK: Mutex<()> = Mutex::new(());

/// Returns the emulator, which is created at the first call; `None` if there is no topology.
pub(crate) fn nic() -> Option<&'static Nic> {
    if let Some(nic) = existing() {
        return Some(nic);
    }
    if DISABLED.load(Ordering::Relaxed) {
        return None;
    }
    let _guard = INIT_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(nic) = existing() {
        return Some(nic);
    }
    let made = catch_unwind(AssertUnwindSafe(make)).unwrap_or(None);
    match made {
        Some(nic) => set_nic(nic),
        None => {
            DISABLED.store(true, Ordering::Relaxed);
            None
        }
    }
}

fn make() -> Option<Nic> {
    let path = std::env::var_os(launch::TOPOLOGY).filter(|path| !path.is_empty())?;
    let complain =
        |error: &dyn std::fmt::Display| Log::stderr().line(format_args!("{error}; there are no emulated NICs"));
    let mut topology = Topology::load(Path::new(&path)).inspect_err(|error| complain(error)).ok()?;
    match std::env::var(launch::DOORBELLS).as_deref() {
        Ok("trap") => topology.doorbells = Doorbells::Trap,
        Ok("queue") => topology.doorbells = Doorbells::Queue,
        Ok("scan") => topology.doorbells = Doorbells::Scan,
        Ok(other) => complain(&format_args!("{} is {other:?}; expected trap, queue or scan", launch::DOORBELLS)),
        Err(_) => {}
    }
    match std::env::var(launch::ABI).as_deref() {
        Ok(form @ ("write" | "ioctl")) => topology.write_abi = form == "write",
        Ok(other) => complain(&format_args!("{} is {other:?}; expected ioctl or write", launch::ABI)),
        Err(_) => {}
    }
    let log = match &topology.log {
        Some(path) => {
            Log::file(path).inspect_err(|error| complain(&format_args!("{}: {error}", path.display()))).ok()?
        }
        None => Log::stderr(),
    };
    // SAFETY: the functions live as long as the process, because this library is never unloaded.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
        libc::atexit(at_exit);
    }
    Some(Emulator::new(topology, Process, log))
}

/// Locks what the child needs, so that no other thread holds it during the fork.
extern "C" fn before_fork() {
    remote_doorbells::lock_for_fork();
}

extern "C" fn after_fork() {
    remote_doorbells::unlock_after_fork();
}

/// Resets the state in the child. Only plain stores are safe here, because other threads of the parent may
/// have held any lock.
extern "C" fn in_child() {
    remote_doorbells::unlock_after_fork();
    process::reset_after_fork();
    traps::reset_after_fork();
    thread::reset_after_fork();
}

extern "C" fn at_exit() {
    let Some(nic) = existing() else { return };
    let Some(path) = nic.topology().stats.as_ref().filter(|_| thread::started()) else { return };
    let written = catch_unwind(AssertUnwindSafe(|| std::fs::write(path, format!("{:#}\n", nic.counters()))));
    if !matches!(written, Ok(Ok(()))) {
        nic.log().line(format_args!("cannot write counters to {}", path.display()));
    }
}
