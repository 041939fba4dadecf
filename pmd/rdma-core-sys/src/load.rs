//! Opening the libraries, and what is said when one of them, or a function in it, is not there.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hbldv::Hbldv;
use crate::ibverbs::Ibverbs;
use crate::manadv::Manadv;
use crate::mlx5dv::Mlx5dv;

/// Environment variable that names the directory of the RDMA libraries: what [`Search::from_environment`] reads.
pub const LIBRARY_DIRECTORY_VARIABLE: &str = "WIREPATH_RDMA_LIB_DIR";

/// Version of an rdma-core release, as it ends the file names of its libraries (`libibverbs.so.1.14.44.0`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Such as 44.
    pub major: u32,
    /// Of a stable release; 0 at first.
    pub minor: u32,
}

impl Version {
    /// From the name of a library's file: the last two of at least four numbers behind `.so.`.
    fn of_file(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let (_, numbers) = name.split_once(".so.")?;
        let numbers: Vec<u32> = numbers.split('.').map(str::parse).collect::<Result<_, _>>().ok()?;
        match numbers[..] {
            [_, _, .., major, minor] => Some(Self { major, minor }),
            _ => None,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Where the libraries are looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Search {
    /// Where the dynamic linker looks.
    #[default]
    System,
    /// In one directory and nowhere else: all libraries must come from one release. libibverbs opens providers by itself from the
    /// directory that it was built for, so those found here (also in a folder `libibverbs` in it) are opened first, and register
    /// themselves before it asks for them.
    Directory(PathBuf),
}

impl Search {
    /// The directory that [`LIBRARY_DIRECTORY_VARIABLE`] names, else the system.
    pub fn from_environment() -> Self {
        match std::env::var_os(LIBRARY_DIRECTORY_VARIABLE) {
            Some(directory) if !directory.is_empty() => Self::Directory(directory.into()),
            _ => Self::System,
        }
    }
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("where the system keeps its libraries"),
            Self::Directory(directory) => write!(f, "in {}", directory.display()),
        }
    }
}

/// A library that is loaded, for good: rdma-core registers providers and threads that no unloading would survive.
#[derive(Clone, Debug)]
pub struct Library {
    /// Such as `libmlx5`.
    pub name: &'static str,
    /// The file, symbolic links resolved.
    pub path: PathBuf,
    /// What the file's name says.
    pub version: Option<Version>,
    handle: Handle,
    /// The files that its functions lie in: a library can hand on those of another.
    code: Vec<PathBuf>,
}

/// What dlopen(3) returned; never closed.
#[derive(Clone, Copy, Debug)]
struct Handle(*mut c_void);

// SAFETY: the handle is a number to the dynamic linker, whose functions are thread-safe.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Library {
    fn open(name: &'static str, file: &str, search: &Search) -> Result<Self, LoadError> {
        use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
        let place = match search {
            Search::System => PathBuf::from(file),
            Search::Directory(directory) => directory.join(file),
        };
        // SAFETY: the libraries of rdma-core only register themselves when they are loaded; that whoever chose the directory put
        // rdma-core there has to be believed.
        let loaded = unsafe { Loaded::open(Some(&place), RTLD_NOW | RTLD_LOCAL) };
        let handle = loaded.map_err(|error| LoadError::Library {
            library: name,
            search: search.clone(),
            reason: chain(&error),
        })?;
        let handle = Handle(handle.into_raw());
        let path = file_of_handle(handle).unwrap_or(place);
        Ok(Self { name, version: Version::of_file(&path), code: vec![path.clone()], path, handle })
    }

    /// Whether the library holds the code at this address.
    pub fn contains(&self, address: *const ()) -> bool {
        file_of_address(address).is_some_and(|path| self.code.contains(&path))
    }

    /// Notes where a function was found.
    pub(crate) fn note(&mut self, function: *mut c_void) {
        if let Some(path) = file_of_address(function.cast_const().cast())
            && !self.code.contains(&path)
        {
            self.code.push(path);
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.version {
            Some(version) => write!(f, "{} {version} ({})", self.name, self.path.display()),
            None => write!(f, "{} of unknown version ({})", self.name, self.path.display()),
        }
    }
}

/// An error with all that it says about its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// The file that a handle of dlopen(3) stands for.
fn file_of_handle(handle: Handle) -> Option<PathBuf> {
    /// The start of `struct link_map` of `link.h`.
    #[repr(C)]
    struct LinkMap {
        address: usize,
        name: *const c_char,
    }
    const RTLD_DI_LINKMAP: c_int = 2;
    unsafe extern "C" {
        fn dlinfo(handle: *mut c_void, request: c_int, info: *mut c_void) -> c_int;
    }
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: dlinfo(3) stores a pointer to the library's entry, which lives as long as the library.
    unsafe {
        if dlinfo(handle.0, RTLD_DI_LINKMAP, (&raw mut map).cast()) != 0 || map.is_null() || (*map).name.is_null() {
            return None;
        }
        resolved(CStr::from_ptr((*map).name))
    }
}

/// The file that an address was loaded from.
fn file_of_address(address: *const ()) -> Option<PathBuf> {
    // SAFETY: all-zero is a valid Dl_info, and dladdr(3) looks the address up without touching it.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address.cast(), &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        resolved(CStr::from_ptr(info.dli_fname))
    }
}

fn resolved(name: &CStr) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    Some(path.canonicalize().unwrap_or_else(|_| path.to_path_buf()))
}

/// A function that the loaded library does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSymbol {
    /// Such as `libmlx5`.
    pub library: &'static str,
    /// The file that was looked into.
    pub path: PathBuf,
    /// Its version, if its name tells.
    pub found: Option<Version>,
    /// The function.
    pub symbol: &'static str,
    /// rdma-core release that first had it; 0: none has.
    pub needed: u32,
}

impl fmt::Display for MissingSymbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.found {
            Some(version) => write!(f, "{} {version}", self.library)?,
            None => write!(f, "{} of unknown version", self.library)?,
        }
        write!(f, " ({}) has no {}; it ", self.path.display(), self.symbol)?;
        match self.needed {
            0 => f.write_str("is in no released rdma-core"),
            needed => write!(f, "needs rdma-core {needed}.0 or newer"),
        }
    }
}

impl std::error::Error for MissingSymbol {}

/// Why RDMA, or a part of it, is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// A library is not there, or cannot be used.
    #[error("{library} cannot be loaded, looked for {search}: {reason}{}", what_helps(library, search))]
    Library {
        /// Such as `libibverbs`.
        library: &'static str,
        /// Where it was looked for.
        search: Search,
        /// What the dynamic linker said.
        reason: String,
    },
    /// libibverbs keeps state for the whole process, so that a second copy from elsewhere is no choice.
    #[error("RDMA libraries are loaded already, looked for {loaded}; they cannot be loaded again {wanted}")]
    LoadedFromElsewhere {
        /// Where those in use were found.
        loaded: Search,
        /// Where they were asked for.
        wanted: Search,
    },
    /// A function is not there.
    #[error(transparent)]
    Symbol(#[from] MissingSymbol),
}

fn what_helps(library: &str, search: &Search) -> String {
    match search {
        Search::Directory(_) => format!(
            "; {LIBRARY_DIRECTORY_VARIABLE} (or the setting) must name a directory with all RDMA libraries of one rdma-core release"
        ),
        Search::System if library == "libhbl" => {
            "; no distribution has it, name its directory in ".to_owned() + LIBRARY_DIRECTORY_VARIABLE
        }
        Search::System => format!(
            "; install rdma-core (Debian: apt-get install ibverbs-providers), or name the directory of its libraries in \
             {LIBRARY_DIRECTORY_VARIABLE}"
        ),
    }
}

/// A function as the table of its library lists it.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Its name.
    pub name: &'static str,
    /// The symbol version it is asked for in.
    pub version: &'static str,
    /// rdma-core release that first had it; 0: none has.
    pub since: u32,
    /// Whether the loaded library has it.
    pub present: bool,
}

/// Declares the functions of a library, each with its symbol version and the first rdma-core release that has it: each is looked up
/// when the library is loaded, in just this version (what a linked program would be bound to), and may be absent.
macro_rules! library {
    (
        $(#[$meta:meta])*
        pub struct $library:ident: $name:literal $file:literal {
            $($(#[$fm:meta])* fn $function:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty = $version:literal since $since:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $library {
            library: $crate::Library,
            $($function: Option<unsafe extern "C" fn($($type),*) -> $result>,)*
        }

        impl $library {
            pub(crate) const NAME: &'static str = $name;
            pub(crate) const FILE: &'static str = $file;

            pub(crate) fn resolve(mut library: $crate::Library) -> Self {
                let look = $crate::load::Look::into(&library, &[$((concat!(stringify!($function), "\0"), concat!($version, "\0"))),*]);
                Self {
                    $($function: look.up(concat!(stringify!($function), "\0"), concat!($version, "\0")).map(|address| {
                        library.note(address);
                        // SAFETY: the symbol in this version is a function of this type, see the header.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $result>(address) }
                    }),)*
                    library,
                }
            }

            /// The loaded file.
            pub fn library(&self) -> &$crate::Library {
                &self.library
            }

            /// Every function of the table.
            pub fn symbols(&self) -> Vec<$crate::Symbol> {
                vec![$($crate::Symbol {
                    name: stringify!($function),
                    version: $version,
                    since: $since,
                    present: self.$function.is_some(),
                }),*]
            }

            $(
                $(#[$fm])*
                pub fn $function(&self) -> Result<unsafe extern "C" fn($($argument: $type),*) -> $result, $crate::MissingSymbol> {
                    self.$function.ok_or_else(|| self.library.missing(stringify!($function), $since))
                }
            )*
        }
    };
}
/// Looks functions up in a library. All strings end with a zero byte.
pub(crate) struct Look {
    handle: Handle,
    /// Whether it gives its functions in versions at all: a library that has none of them in the version asked for does not, and is
    /// taken as it is.
    versioned: bool,
}

impl Look {
    pub(crate) fn into(library: &Library, functions: &[(&str, &str)]) -> Self {
        let look = Self { handle: library.handle, versioned: true };
        let versioned = functions.iter().any(|(symbol, version)| look.up(symbol, version).is_some());
        Self { versioned, ..look }
    }

    pub(crate) fn up(&self, symbol: &str, version: &str) -> Option<*mut c_void> {
        let symbol = CStr::from_bytes_with_nul(symbol.as_bytes()).ok()?;
        let version = CStr::from_bytes_with_nul(version.as_bytes()).ok()?;
        // SAFETY: a loaded library and two C strings.
        let address = unsafe {
            if self.versioned {
                libc::dlvsym(self.handle.0, symbol.as_ptr(), version.as_ptr())
            } else {
                libc::dlsym(self.handle.0, symbol.as_ptr())
            }
        };
        (!address.is_null()).then_some(address)
    }
}

impl Library {
    pub(crate) fn missing(&self, symbol: &'static str, needed: u32) -> MissingSymbol {
        MissingSymbol { library: self.name, path: self.path.clone(), found: self.version, symbol, needed }
    }
}

/// The RDMA libraries of this process.
#[derive(Debug)]
pub struct RdmaCore {
    search: Search,
    ibverbs: Ibverbs,
    mana: Result<Manadv, LoadError>,
    mlx5: Result<Mlx5dv, LoadError>,
    hbl: Result<Hbldv, LoadError>,
}

/// The libraries in use; a failed attempt leaves none, so that another directory can be tried.
static LOADED: Mutex<Option<&'static RdmaCore>> = Mutex::new(None);

impl RdmaCore {
    /// Opens libibverbs, and what there is of libmana, libmlx5 and libhbl, once for the process: they are never unloaded.
    ///
    /// # Errors
    /// libibverbs is not there, or libraries from elsewhere are in use already.
    pub fn load(search: &Search) -> Result<&'static Self, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(libraries) = *loaded {
            if libraries.search != *search {
                return Err(LoadError::LoadedFromElsewhere {
                    loaded: libraries.search.clone(),
                    wanted: search.clone(),
                });
            }
            return Ok(libraries);
        }
        let libraries: &'static Self = Box::leak(Box::new(Self::open(search)?));
        *loaded = Some(libraries);
        Ok(libraries)
    }

    fn open(search: &Search) -> Result<Self, LoadError> {
        // libibverbs first: the others find it by its name among what is loaded, wherever it came from. They are bound to it by a symbol
        // version that changes with the private interface, so that one of another release is refused by the dynamic linker.
        let ibverbs = Ibverbs::resolve(Library::open(Ibverbs::NAME, Ibverbs::FILE, search)?);
        // Before anything lists devices: a provider registers itself when it is loaded.
        let mana = Library::open(Manadv::NAME, Manadv::FILE, search).map(Manadv::resolve);
        let mlx5 = Library::open(Mlx5dv::NAME, Mlx5dv::FILE, search).map(Mlx5dv::resolve);
        let hbl = Library::open(Hbldv::NAME, Hbldv::FILE, search).map(Hbldv::resolve);
        if let Search::Directory(directory) = search {
            open_providers(directory);
        }
        Ok(Self { search: search.clone(), ibverbs, mana, mlx5, hbl })
    }

    /// Where the libraries were looked for.
    pub fn search(&self) -> &Search {
        &self.search
    }

    /// libibverbs.
    pub fn ibverbs(&self) -> &Ibverbs {
        &self.ibverbs
    }

    /// What RDMAV_ALLOW_DISASSOC_DESTROY does in the environment: once the kernel has taken a device away it has destroyed all objects,
    /// and destroying them in the library (`EIO` from the kernel) has to succeed, or their memory would never be freed. Setting a
    /// variable in the environment of a running program is not safe; the flag behind it is exported. Absent: only memory is lost.
    ///
    /// To be called after `ibv_get_device_list`: the first one initialises libibverbs, and sets the flag by the environment.
    pub fn allow_destroying_after_the_device_is_gone(&self) {
        let handle = self.ibverbs.library().handle;
        // SAFETY: a loaded library and a C string; the symbol is a C bool, which libibverbs only reads once it is initialised.
        unsafe {
            let flag = libc::dlsym(handle.0, c"verbs_allow_disassociate_destroy".as_ptr()).cast::<bool>();
            if !flag.is_null() {
                AtomicBool::from_ptr(flag).store(true, Ordering::Relaxed);
            }
        }
    }

    /// libmana.
    ///
    /// # Errors
    /// Why it is not there.
    pub fn mana(&self) -> Result<&Manadv, LoadError> {
        self.mana.as_ref().map_err(Clone::clone)
    }

    /// libmlx5.
    ///
    /// # Errors
    /// Why it is not there.
    pub fn mlx5(&self) -> Result<&Mlx5dv, LoadError> {
        self.mlx5.as_ref().map_err(Clone::clone)
    }

    /// libhbl.
    ///
    /// # Errors
    /// Why it is not there: no distribution has it.
    pub fn hbl(&self) -> Result<&Hbldv, LoadError> {
        self.hbl.as_ref().map_err(Clone::clone)
    }

    /// The libraries that are loaded.
    pub fn libraries(&self) -> Vec<&Library> {
        let direct = [
            self.mana.as_ref().ok().map(Manadv::library),
            self.mlx5.as_ref().ok().map(Mlx5dv::library),
            self.hbl.as_ref().ok().map(Hbldv::library),
        ];
        std::iter::once(self.ibverbs.library()).chain(direct.into_iter().flatten()).collect()
    }
}

/// Opens every provider plug-in (`lib*-rdmav44.so` and the like) of a directory, as libibverbs would. One that cannot be opened is a
/// device driver less, no failure.
fn open_providers(directory: &Path) {
    use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
    for directory in [directory.to_path_buf(), directory.join("libibverbs")] {
        let Ok(entries) = directory.read_dir() else { continue };
        let mut plugins: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(|path| is_provider(path)).collect();
        plugins.sort();
        for plugin in plugins {
            // SAFETY: as in `Library::open`.
            if let Ok(loaded) = unsafe { Loaded::open(Some(&plugin), RTLD_NOW | RTLD_LOCAL) } {
                let _: *mut c_void = loaded.into_raw();
            }
        }
    }
}

fn is_provider(path: &Path) -> bool {
    path.file_name()
        .and_then(OsStr::to_str)
        .and_then(|name| name.strip_prefix("lib")?.strip_suffix(".so")?.split_once("-rdmav"))
        .is_some_and(|(_, version)| !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_end_of_the_files_name() {
        let version = |name: &str| Version::of_file(Path::new(name)).map(|version| version.to_string());
        assert_eq!(version("/usr/lib/libibverbs.so.1.14.44.0").as_deref(), Some("44.0"));
        assert_eq!(version("libmana.so.1.0.65.2").as_deref(), Some("65.2"));
        for unknown in ["libmana.so", "libmana.so.1", "libmana.so.1.0.44", "libmana.so.1.x.44.0", "mana", "/", ""] {
            assert_eq!(version(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn only_plug_ins_are_taken_for_providers() {
        assert!(is_provider(Path::new("/x/libmana-rdmav34.so")));
        for other in ["libmana.so.1", "libmana-rdmav34.so.1", "libmana-rdmav.so", "mana-rdmav34.so", "lib-rdmavx.so"] {
            assert!(!is_provider(Path::new(other)), "{other}");
        }
    }
}
