use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Gid, Pid, Uid};

/// Connections that wait until the program accepts them. The kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;
/// Longest wait for another program that makes or removes a socket in the same folder.
const FOLDER_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

/// User and group of new socket files, if another than the process.
static OWNER: OnceLock<(u32, u32)> = OnceLock::new();

/// Makes all later sockets of the process belong to this user and group. A program calls this before it opens sockets
/// as root, if it becomes this user afterwards: else that user could not connect. Only the first call has an effect.
pub fn set_owner(user: u32, group: u32) {
    let _ = OWNER.set((user, group));
}

/// Mode and group of a socket file. A process needs write permission to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Permission bits.
    pub mode: u32,
    /// Group of the file; `None`: that of the process.
    pub group: Option<u32>,
}

impl Default for Access {
    /// Only the user of the process may connect.
    fn default() -> Self {
        Self { mode: 0o600, group: None }
    }
}

/// The process at the other end of a connection, at the time when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Process; 0 if it is in a process namespace that this process does not see.
    pub pid: i32,
}

impl Peer {
    /// Returns the process at the other end of a connected socket.
    ///
    /// # Errors
    /// If the socket is not connected.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let credentials = socket_peercred(socket)?;
        Ok(Self {
            uid: credentials.uid.as_raw(),
            gid: credentials.gid.as_raw(),
            pid: Pid::as_raw(Some(credentials.pid)),
        })
    }

    /// Returns true if the process belongs to root or to the user of this process.
    pub fn is_owner(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {}, pid {}", self.uid, self.pid)
    }
}

/// A listening UNIX stream socket. Dropping it removes its file, unless another file has that name by now.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file. The socket holds the inode, so no other file gets its number.
    file: (u64, u64),
}

impl Listener {
    /// Listens on a path. The file has its final mode, or a stricter one, from the first moment. A socket without
    /// a listener, which a killed program left behind, is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if a program listens there, `AlreadyExists` if the path is not a socket, and the errors of the
    /// system calls.
    pub fn bind(path: &Path, access: &Access) -> io::Result<Self> {
        let _folder = lock_folder(path);
        remove_stale(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Linux takes the mode of the file from the inode of the socket, and applies the umask.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(access.mode & 0o600))?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        let file = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        let listener = Self { socket, path: path.to_owned(), file: (stat.st_dev, stat.st_ino) };
        let owner = OWNER.get().copied();
        let user = owner.map(|(user, _)| Uid::from_raw(user));
        if let Some(group) = access.group.or(owner.map(|(_, group)| group)) {
            rustix::fs::chownat(&file, "", user, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
        }
        if stat.st_mode & 0o7777 != access.mode {
            let mode = std::fs::Permissions::from_mode(access.mode);
            std::fs::set_permissions(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)?;
        }
        rustix::net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// Finds why [`Self::bind`] would fail on this path, and changes nothing.
    ///
    /// # Errors
    /// The errors of [`Self::bind`], except for a group that the process may not use.
    pub fn check(path: &Path) -> io::Result<()> {
        is_stale(path)?;
        SocketAddrUnix::new(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(rustix::fs::accessat(
            CWD,
            folder,
            rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
            AtFlags::EACCESS,
        )?)
    }

    /// Returns the next connection that waits, without blocking. The stream does not block either.
    pub fn accept(&self) -> Option<(UnixStream, Peer)> {
        self.try_accept().ok().flatten()
    }

    /// Like [`Self::accept`], and tells a connection that cannot be accepted from none.
    ///
    /// # Errors
    /// The errors of accept(2) if a connection may wait: no free file descriptor (`EMFILE`, `ENFILE`), or no memory.
    pub fn try_accept(&self) -> io::Result<Option<(UnixStream, Peer)>> {
        // The limit keeps a peer that connects and leaves at once from holding the caller.
        for _ in 0..16 {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => match Peer::of(&stream) {
                    Ok(peer) => return Ok(Some((stream.into(), peer))),
                    Err(_) => continue,
                },
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// Returns the path of the socket file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _folder = lock_folder(&self.path);
        let own = |file: &std::fs::Metadata| file.file_type().is_socket() && (file.dev(), file.ino()) == self.file;
        if std::fs::symlink_metadata(&self.path).is_ok_and(|file| own(&file)) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket file that a killed program left behind. Any other file stays, and so does a socket on which a
/// program listens.
pub fn remove_abandoned(path: &Path) {
    let _folder = lock_folder(path);
    let _ = remove_stale(path);
}

/// Removes a socket file without a listener.
fn remove_stale(path: &Path) -> io::Result<()> {
    if is_stale(path)? { std::fs::remove_file(path) } else { Ok(()) }
}

/// Returns true if there is a socket file without a listener, and false if there is no file.
///
/// # Errors
/// As those of [`Listener::bind`]: there is another file, or a program listens.
fn is_stale(path: &Path) -> io::Result<bool> {
    let file = match std::fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if !file.file_type().is_socket() {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file that is not a socket"));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // A socket that does not block gets EAGAIN if the backlog of the listener is full.
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        _ => Err(io::Error::new(ErrorKind::AddrInUse, "another program listens there")),
    }
}

/// Locks the folder of a socket against other programs that make or remove a socket there. Without the lock, two
/// programs that find the same stale socket could remove each other's new one. A folder that cannot be locked is
/// used without.
fn lock_folder(path: &Path) -> Option<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(CWD, folder, flags, Mode::empty()).ok()?;
    let end = Instant::now() + FOLDER_TIMEOUT;
    loop {
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            Err(_) => return None,
        }
    }
}

/// Connects to a socket. Connecting, and each later read or write of the stream, ends within `limit`. A socket whose
/// program is about to listen is waited for, one second at most.
///
/// # Errors
/// `WouldBlock` if the listener does not accept the connection in that time, and the errors of connect(2).
pub fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The limits are set first: connect(2) itself blocks while the backlog is full.
    for option in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, option, Some(limit))?;
    }
    let address = SocketAddrUnix::new(path)?;
    match rustix::net::connect(&socket, &address) {
        Err(Errno::CONNREFUSED) => {
            // A program between bind(2) and listen(2) holds the lock. The socket is ready, or stale, when it is free.
            drop(lock_folder(path));
            rustix::net::connect(&socket, &address)?;
        }
        result => result?,
    }
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn the_mode_is_never_wider_than_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut modes = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    modes.extend(std::fs::metadata(&path).map(|file| file.permissions().mode() & 0o7777));
                }
                modes.sort_unstable();
                modes.dedup();
                modes
            });
            for _ in 0..3000 {
                drop(Listener::bind(&path, &Access::default()).unwrap());
            }
            done.store(true, Ordering::Relaxed);
            assert_eq!(watcher.join().unwrap(), [0o600]);
        });
        let listener = Listener::bind(&path, &Access { mode: 0o666, group: None }).unwrap();
        assert_eq!((mode(&path), listener.path()), (0o666, &*path));
    }

    #[test]
    fn only_stale_sockets_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let kind = |path: &Path| Listener::bind(path, &Access::default()).unwrap_err().kind();
        let first = Listener::bind(&path, &Access::default()).unwrap();
        assert_eq!(kind(&path), ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists());
        // A killed program leaves its socket.
        drop(UnixListener::bind(&path).unwrap());
        drop(Listener::bind(&path, &Access::default()).unwrap());
        // Other files stay, and so does what a link names.
        std::fs::write(&path, "text").unwrap();
        assert_eq!((kind(&path), std::fs::read_to_string(&path).unwrap().as_str()), (ErrorKind::AlreadyExists, "text"));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(kind(&link), ErrorKind::AlreadyExists);
        // A listener with a full backlog is alive.
        let busy = folder.path().join("busy.sock");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&busy).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let _first = UnixStream::connect(&busy).unwrap();
        assert_eq!(kind(&busy), ErrorKind::AddrInUse);
        assert_eq!(connect(&busy, Duration::from_millis(1)).unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn the_socket_of_another_program_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let first = Listener::bind(&path, &Access::default()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::bind(&path, &Access::default()).unwrap();
        drop(first);
        assert!(connect(&path, Duration::from_secs(1)).is_ok(), "the second listener is still there");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "text").unwrap();
        drop(second);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
    }

    #[test]
    fn a_client_waits_for_a_program_that_is_about_to_listen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let lock = lock_folder(&path).expect("a free folder");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        std::thread::scope(|scope| {
            let client = scope.spawn(|| connect(&path, Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(50));
            rustix::net::listen(&socket, 1).unwrap();
            drop(lock);
            client.join().unwrap().unwrap();
        });
        drop(socket);
        assert_eq!(connect(&path, Duration::from_secs(60)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn peers_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let listener = Listener::bind(&path, &Access::default()).unwrap();
        assert!(listener.accept().is_none());
        let _client = connect(&path, Duration::from_secs(1)).unwrap();
        let (_, peer) = listener.accept().unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let own = Peer { uid, gid, pid: std::process::id() as i32 };
        assert!(peer == own && peer.is_owner(), "{peer}");
    }
}
