//! A process with several threads gives up its privileges. Each test starts this program again, because a process does
//! so once.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use wirepath_privileges::{CapabilitySet, Restriction, User, refused_calls, restrict};
use wirepath_testlab::{Requirement, require};

/// Variable with the name of the test that the child process plays.
const ROLE: &str = "WIREPATH_PRIVILEGES_ROLE";

/// Runs `body` in a process of its own and returns what it prints. The child is this test again.
fn in_child(test: &str, body: impl FnOnce()) -> Option<String> {
    if std::env::var(ROLE).is_ok_and(|role| role == test) {
        body();
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, test)
        .output()
        .unwrap();
    let Output { status, stdout, stderr } = output;
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{status}: {stdout}\n{stderr}");
    Some(stdout.into_owned())
}

/// Starts a thread that computes, one that sleeps, one that waits for a lock and one that reads.
fn start_threads() -> impl Sized {
    let lock = Arc::new(Mutex::new(()));
    let held = Box::leak(Box::new(Arc::clone(&lock))).lock().unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(|| {
        loop {
            std::hint::spin_loop();
        }
    });
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    std::thread::spawn(move || drop(lock.lock()));
    std::thread::spawn(move || theirs.read(&mut [0]));
    // A thread that starts others all the time, as a program that is busy may do.
    std::thread::spawn(|| {
        for _ in 0..50 {
            std::thread::spawn(|| std::thread::sleep(Duration::from_millis(20)));
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    (held, ours)
}

/// Returns the fields of `/proc/PID/status` of each thread.
fn threads() -> Vec<BTreeMap<String, String>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc/self/task").unwrap() {
        let Ok(status) = std::fs::read_to_string(entry.unwrap().path().join("status")) else { continue };
        let fields = status.lines().filter_map(|line| line.split_once(':'));
        let fields: BTreeMap<_, _> = fields
            .map(|(key, value)| (key.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
            .collect();
        if !fields["State"].starts_with(['Z', 'X']) {
            all.push(fields);
        }
    }
    all
}

/// Checks the same fields in all threads.
#[track_caller]
fn assert_threads(expected: &[(&str, &str)]) {
    let threads = threads();
    assert!(threads.len() > 4, "{} threads", threads.len());
    for thread in threads {
        for (field, value) in expected {
            assert_eq!(thread[*field], *value, "{field} of thread {}", thread["Name"]);
        }
    }
}

#[test]
fn all_threads_keep_two_capabilities() {
    require!(Requirement::Root);
    in_child("all_threads_keep_two_capabilities", || {
        let _threads = start_threads();
        let keep = CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN;
        let kept = restrict(Restriction { keep, user: None, filter: true }).unwrap();
        assert_eq!(kept, keep);
        let lost = wirepath_privileges::given_up();
        assert!(lost.contains(CapabilitySet::SYS_ADMIN) && !lost.intersects(keep), "{lost:?}");
        let set = "0000000000003000";
        assert_threads(&[("CapPrm", set), ("CapEff", set), ("CapBnd", set), ("CapInh", "0000000000000000")]);
        assert_threads(&[("CapAmb", "0000000000000000"), ("NoNewPrivs", "1"), ("Seccomp", "2"), ("Uid", "0 0 0 0")]);
        assert!(restrict(Restriction { keep, user: None, filter: true }).is_err(), "once");
        // A thread that starts now has no more than its parent.
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || sender.send(std::fs::read_to_string("/proc/thread-self/status").unwrap()));
        let status = receiver.recv().unwrap();
        assert!(status.contains(&format!("CapEff:\t{set}")) && status.contains("Seccomp:\t2"), "{status}");
    });
}

#[test]
fn a_process_becomes_another_user() {
    require!(Requirement::Root);
    in_child("a_process_becomes_another_user", || {
        let _threads = start_threads();
        let user = User::find("nobody").unwrap();
        let (uid, gid) = (user.uid.as_raw().to_string(), user.gid.as_raw().to_string());
        let keep = CapabilitySet::NET_RAW;
        restrict(Restriction { keep, user: Some(user), filter: true }).unwrap();
        let ids = |id: &str| [id; 4].join(" ");
        let set = "0000000000002000";
        assert_threads(&[("Uid", &ids(&uid)), ("Gid", &ids(&gid)), ("Groups", ""), ("CapPrm", set), ("CapBnd", set)]);
        assert_threads(&[("CapEff", set), ("NoNewPrivs", "1"), ("Seccomp", "2")]);
        let refused = std::fs::write("/etc/wirepath-test", "").unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        // What it keeps works: a packet socket.
        let family = rustix::net::AddressFamily::PACKET;
        rustix::net::socket(family, rustix::net::SocketType::RAW, None).unwrap();
    });
}

#[test]
fn a_refused_call_fails_and_is_named() {
    let output = in_child("a_refused_call_fails_and_is_named", || {
        let _threads = start_threads();
        restrict(Restriction { keep: CapabilitySet::empty(), user: None, filter: true }).unwrap();
        assert_eq!(refused_calls(), [], "none yet");
        let error = Command::new("/bin/true").status().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::PERM.raw_os_error()), "{error}");
        let family = rustix::net::AddressFamily::from_raw(libc::AF_VSOCK as u16);
        let socket = rustix::net::socket(family, rustix::net::SocketType::STREAM, None);
        assert_eq!(socket.unwrap_err(), Errno::PERM);
        // In another thread too, and the process goes on.
        let other = std::thread::spawn(|| rustix::system::sethostname(b"x")).join().unwrap();
        assert_eq!(other.unwrap_err(), Errno::PERM);
        let names: Vec<_> = refused_calls().into_iter().map(|call| call.name).collect();
        println!("refused: {names:?}");
        for name in ["socket", "sethostname"] {
            assert!(names.iter().any(|refused| refused == name), "{name}: {names:?}");
        }
        assert_eq!(refused_calls(), [], "each is reported once");
        std::io::stdout().flush().unwrap();
    });
    assert!(output.is_none_or(|output| output.contains("refused: ")));
}

#[test]
#[expect(unsafe_code, reason = "mapping memory has no safe interface")]
fn written_memory_is_never_executed() {
    in_child("written_memory_is_never_executed", || {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};
        restrict(Restriction { keep: CapabilitySet::empty(), user: None, filter: true }).unwrap();
        let (none, page) = (std::ptr::null_mut(), 4096);
        let (written, executed) = (ProtFlags::READ | ProtFlags::WRITE, ProtFlags::READ | ProtFlags::EXEC);
        let library = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: the kernel chooses the addresses, and nobody uses the memory.
        unsafe {
            let both = written | ProtFlags::EXEC;
            assert_eq!(mmap_anonymous(none, page, both, MapFlags::PRIVATE), Err(Errno::PERM));
            let memory = mmap_anonymous(none, page, written, MapFlags::PRIVATE).unwrap();
            assert_eq!(mprotect(memory, page, MprotectFlags::READ | MprotectFlags::EXEC), Err(Errno::PERM));
            mprotect(memory, page, MprotectFlags::READ).unwrap();
            // Code of a file, as the dynamic linker maps it.
            mmap(none, page, executed, MapFlags::PRIVATE, &library, 0).unwrap();
        }
        let names: Vec<_> = refused_calls().into_iter().map(|call| call.name).collect();
        assert_eq!(names, ["mmap", "mprotect"]);
    });
}

#[test]
fn a_thread_that_blocks_the_signal_is_named() {
    let output = in_child("a_thread_that_blocks_the_signal_is_named", || {
        let blocked = std::thread::Builder::new().name("deaf".to_owned());
        let (sender, receiver) = mpsc::channel();
        blocked
            .spawn(move || {
                block_all_signals();
                sender.send(()).unwrap();
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                }
            })
            .unwrap();
        receiver.recv().unwrap();
        let error = restrict(Restriction { keep: CapabilitySet::empty(), user: None, filter: true }).unwrap_err();
        println!("error: {error}");
    });
    assert!(output.is_none_or(|text| text.contains("error: thread deaf blocks SIGSYS and keeps its privileges")));
}

#[expect(unsafe_code, reason = "there is no safe interface to the signal mask of a thread")]
fn block_all_signals() {
    // SAFETY: all-zero bytes are a valid signal set, and the set outlives the calls.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

#[test]
fn only_root_becomes_another_user() {
    require!(Requirement::Root);
    in_child("only_root_becomes_another_user", || {
        let nobody = User::find("nobody").unwrap();
        rustix::thread::set_thread_res_uid(nobody.uid, nobody.uid, nobody.uid).unwrap();
        let root = User::find("root").unwrap();
        let error = restrict(Restriction { keep: CapabilitySet::all(), user: Some(root), filter: false }).unwrap_err();
        assert_eq!(error.to_string(), "only root may become the user \"root\"");
    });
}
