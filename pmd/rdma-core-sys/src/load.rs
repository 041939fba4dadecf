//! Loading of the libraries, and the errors for a missing library or function.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hbldv::Hbldv;
use crate::ibverbs::Ibverbs;
use crate::manadv::Manadv;
use crate::mlx5dv::Mlx5dv;

/// Environment variable with the directory of the RDMA libraries; see [`Search::from_environment`].
pub const LIBRARY_DIRECTORY_VARIABLE: &str = "WIREPATH_RDMA_LIB_DIR";

/// Version of an rdma-core release, taken from the end of library file names (`libibverbs.so.1.14.44.0`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Release number, such as 44.
    pub major: u32,
    /// Number of the stable update; 0 in the first release.
    pub minor: u32,
}

impl Version {
    /// Takes the version from a file name: the last two of at least four numbers after `.so.`.
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

/// Search path of the libraries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Search {
    /// The search path of the dynamic linker.
    #[default]
    System,
    /// One directory and nothing else, because all libraries must be of one release.
    ///
    /// libibverbs opens providers only from the directory that it was built for. The providers in this
    /// directory (and in its subdirectory `libibverbs`) are therefore opened first. They register themselves
    /// before libibverbs searches for them.
    Directory(PathBuf),
}

impl Search {
    /// Returns the directory in [`LIBRARY_DIRECTORY_VARIABLE`], else the system's search path.
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
            Self::System => f.write_str("in the system's library path"),
            Self::Directory(directory) => write!(f, "in {}", directory.display()),
        }
    }
}

/// A loaded library. It is never unloaded: rdma-core registers providers and starts threads, which do not
/// survive unloading.
#[derive(Clone, Debug)]
pub struct Library {
    /// Name, such as `libmlx5`.
    pub name: &'static str,
    /// Path of the file, with symbolic links resolved.
    pub path: PathBuf,
    /// Version according to the file name.
    pub version: Option<Version>,
    handle: Handle,
    /// Files that contain the library's functions. A library can re-export functions of another one.
    code: Vec<PathBuf>,
}

/// Handle from dlopen(3), which is never closed.
#[derive(Clone, Copy, Debug)]
struct Handle(*mut c_void);

// SAFETY: the handle is an opaque value for the functions of the dynamic linker, which are thread-safe.
unsafe impl Send for Handle {}
// SAFETY: the handle is an opaque value for the functions of the dynamic linker, which are thread-safe.
unsafe impl Sync for Handle {}

impl Library {
    fn open(name: &'static str, file: &str, search: &Search) -> Result<Self, LoadError> {
        use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
        let file = match search {
            Search::System => PathBuf::from(file),
            Search::Directory(directory) => directory.join(file),
        };
        // SAFETY: loading a library runs its initialisers. Those of rdma-core only register providers. The
        // operator who sets the directory guarantees that it contains rdma-core.
        let loaded = unsafe { Loaded::open(Some(&file), RTLD_NOW | RTLD_LOCAL) };
        let handle = loaded.map_err(|error| LoadError::Library {
            library: name,
            search: search.clone(),
            reason: chain(&error),
        })?;
        let handle = Handle(handle.into_raw());
        let path = file_of_handle(handle).unwrap_or(file);
        Ok(Self { name, version: Version::of_file(&path), code: vec![path.clone()], path, handle })
    }

    /// True if the code at this address belongs to the library.
    pub fn contains(&self, address: *const ()) -> bool {
        file_of_address(address).is_some_and(|path| self.code.contains(&path))
    }

    /// Records the file that contains a function.
    pub(crate) fn record_code_file(&mut self, function: *mut c_void) {
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

/// Formats an error with all of its causes.
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

/// Returns the file of a dlopen(3) handle.
fn file_of_handle(handle: Handle) -> Option<PathBuf> {
    /// First fields of `struct link_map` in `link.h`.
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
    // SAFETY: the handle is open. dlinfo(3) stores a pointer to the library's link map entry, which is valid
    // as long as the library is loaded. Its name is a C string.
    unsafe {
        if dlinfo(handle.0, RTLD_DI_LINKMAP, (&raw mut map).cast()) != 0 || map.is_null() || (*map).name.is_null() {
            return None;
        }
        resolved(CStr::from_ptr((*map).name))
    }
}

/// Returns the file that contains the code at an address.
fn file_of_address(address: *const ()) -> Option<PathBuf> {
    // SAFETY: a zeroed Dl_info is valid. dladdr(3) only compares the address and does not access it. The file
    // name that it stores is a C string of a loaded library.
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
    /// Name, such as `libmlx5`.
    pub library: &'static str,
    /// Path of the loaded file.
    pub path: PathBuf,
    /// Version of the file, if its name contains one.
    pub found: Option<Version>,
    /// Name of the function.
    pub symbol: &'static str,
    /// First rdma-core release with the function; 0 if none has it.
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

/// Reasons why RDMA, or a part of it, is unavailable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// A library is missing or cannot be loaded.
    #[error("{library} cannot be loaded, looked for {search}: {reason}{}", load_hint(library, search))]
    Library {
        /// Name, such as `libibverbs`.
        library: &'static str,
        /// Searched path.
        search: Search,
        /// Error of the dynamic linker.
        reason: String,
    },
    /// libibverbs keeps process-wide state, so a second copy from another directory cannot be loaded.
    #[error("RDMA libraries are loaded already, looked for {loaded}; they cannot be loaded again {wanted}")]
    LoadedFromElsewhere {
        /// Search path of the loaded libraries.
        loaded: Search,
        /// Requested search path.
        wanted: Search,
    },
    /// A function is missing.
    #[error(transparent)]
    Symbol(#[from] MissingSymbol),
}

fn load_hint(library: &str, search: &Search) -> String {
    match search {
        Search::Directory(_) => format!(
            "; {LIBRARY_DIRECTORY_VARIABLE} (or the setting) must name a directory with all RDMA libraries of one \
             rdma-core release"
        ),
        Search::System if library == "libhbl" => {
            "; no distribution has it, so name its directory in ".to_owned() + LIBRARY_DIRECTORY_VARIABLE
        }
        Search::System => format!(
            "; install rdma-core (Debian: apt-get install ibverbs-providers), or name the directory of its libraries \
             in {LIBRARY_DIRECTORY_VARIABLE}"
        ),
    }
}

/// Table entry of a library function.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Name of the function.
    pub name: &'static str,
    /// Symbol version that is looked up.
    pub version: &'static str,
    /// First rdma-core release with the function; 0 if none has it.
    pub since: u32,
    /// True if the loaded library has the function.
    pub present: bool,
}

/// Declares the functions of a library, each with its symbol version and the first rdma-core release that has
/// it.
///
/// Functions are looked up when the library is loaded, in exactly this version, to which a linked program
/// would be bound. Each may be absent.
macro_rules! library {
    (
        $(#[$meta:meta])*
        pub struct $library:ident: $name:literal $file:literal {
            $($(#[$fm:meta])* fn $function:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty
                = $version:literal since $since:literal;)*
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
                let functions = [$((concat!(stringify!($function), "\0"), concat!($version, "\0"))),*];
                let lookup = $crate::load::SymbolLookup::new(&library, &functions);
                Self {
                    $($function: lookup.find(
                        concat!(stringify!($function), "\0"),
                        concat!($version, "\0"),
                    ).map(|address| {
                        library.record_code_file(address);
                        // SAFETY: in the C header the function of this name and symbol version has this type.
                        unsafe {
                            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $result>(
                                address,
                            )
                        }
                    }),)*
                    library,
                }
            }

            /// Returns the loaded library.
            pub fn library(&self) -> &$crate::Library {
                &self.library
            }

            /// Returns all functions of the table.
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
                pub fn $function(
                    &self,
                ) -> Result<unsafe extern "C" fn($($argument: $type),*) -> $result, $crate::MissingSymbol> {
                    self.$function.ok_or_else(|| self.library.missing(stringify!($function), $since))
                }
            )*
        }
    };
}
/// Symbol lookup in a loaded library. All names end with a zero byte.
pub(crate) struct SymbolLookup {
    handle: Handle,
    /// True if the library has symbol versions. If no function is found in its version, the library has none,
    /// and functions are looked up without versions.
    versioned: bool,
}

impl SymbolLookup {
    pub(crate) fn new(library: &Library, functions: &[(&str, &str)]) -> Self {
        let lookup = Self { handle: library.handle, versioned: true };
        let versioned = functions.iter().any(|(symbol, version)| lookup.find(symbol, version).is_some());
        Self { versioned, ..lookup }
    }

    pub(crate) fn find(&self, symbol: &str, version: &str) -> Option<*mut c_void> {
        let symbol = CStr::from_bytes_with_nul(symbol.as_bytes()).ok()?;
        let version = CStr::from_bytes_with_nul(version.as_bytes()).ok()?;
        // SAFETY: the handle is of a library that is never unloaded, and both names are C strings.
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

/// The loaded libraries. A failed attempt stores nothing, so that another directory can be tried.
static LOADED: Mutex<Option<&'static RdmaCore>> = Mutex::new(None);

impl RdmaCore {
    /// Loads libibverbs, and libmana, libmlx5 and libhbl if they exist, once per process. They are never
    /// unloaded.
    ///
    /// # Errors
    /// libibverbs is missing, or libraries from another directory are loaded already.
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
        // libibverbs is loaded first. The others find it by its name among the loaded libraries, wherever it
        // came from. Their symbol version changes with the private interface, so that the dynamic linker
        // refuses a libibverbs of another release.
        let ibverbs = Ibverbs::resolve(Library::open(Ibverbs::NAME, Ibverbs::FILE, search)?);
        // A provider registers itself when it is loaded, so this must precede the first device list.
        let mana = Library::open(Manadv::NAME, Manadv::FILE, search).map(Manadv::resolve);
        let mlx5 = Library::open(Mlx5dv::NAME, Mlx5dv::FILE, search).map(Mlx5dv::resolve);
        let hbl = Library::open(Hbldv::NAME, Hbldv::FILE, search).map(Hbldv::resolve);
        if let Search::Directory(directory) = search {
            open_providers(directory);
        }
        Ok(Self { search: search.clone(), ibverbs, mana, mlx5, hbl })
    }

    /// Returns the search path of the libraries.
    pub fn search(&self) -> &Search {
        &self.search
    }

    /// Returns libibverbs.
    pub fn ibverbs(&self) -> &Ibverbs {
        &self.ibverbs
    }

    /// Lets destroy functions succeed after the kernel removed a device, as RDMAV_ALLOW_DISASSOC_DESTROY
    /// does.
    ///
    /// When the kernel removes a device it destroys all its objects, and later destroy commands fail with
    /// `EIO`. Unless libibverbs treats this as success, it never frees their memory. Setting an environment
    /// variable in a running program is not safe, but libibverbs exports the flag behind it. Without that
    /// symbol, only memory is lost.
    ///
    /// Call it after `ibv_get_device_list`: the first call initialises libibverbs and sets the flag from the
    /// environment.
    pub fn allow_disassociate_destroy(&self) {
        let handle = self.ibverbs.library().handle;
        // SAFETY: the handle is of a loaded library and the name is a C string. The symbol is a C bool with
        // static lifetime, and initialised libibverbs only reads it.
        unsafe {
            let flag = libc::dlsym(handle.0, c"verbs_allow_disassociate_destroy".as_ptr()).cast::<bool>();
            if !flag.is_null() {
                AtomicBool::from_ptr(flag).store(true, Ordering::Relaxed);
            }
        }
    }

    /// Returns libmana.
    ///
    /// # Errors
    /// The library is missing or cannot be loaded.
    pub fn mana(&self) -> Result<&Manadv, LoadError> {
        self.mana.as_ref().map_err(Clone::clone)
    }

    /// Returns libmlx5.
    ///
    /// # Errors
    /// The library is missing or cannot be loaded.
    pub fn mlx5(&self) -> Result<&Mlx5dv, LoadError> {
        self.mlx5.as_ref().map_err(Clone::clone)
    }

    /// Returns libhbl.
    ///
    /// # Errors
    /// The library is missing, as in all distributions, or cannot be loaded.
    pub fn hbl(&self) -> Result<&Hbldv, LoadError> {
        self.hbl.as_ref().map_err(Clone::clone)
    }

    /// Returns the loaded libraries.
    pub fn libraries(&self) -> Vec<&Library> {
        let direct = [
            self.mana.as_ref().ok().map(Manadv::library),
            self.mlx5.as_ref().ok().map(Mlx5dv::library),
            self.hbl.as_ref().ok().map(Hbldv::library),
        ];
        std::iter::once(self.ibverbs.library()).chain(direct.into_iter().flatten()).collect()
    }
}

/// Opens all provider plug-ins (such as `lib*-rdmav44.so`) of a directory, as libibverbs would. A plug-in
/// that cannot be opened is skipped: only its devices are missing.
fn open_providers(directory: &Path) {
    use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
    for directory in [directory.to_path_buf(), directory.join("libibverbs")] {
        let Ok(entries) = directory.read_dir() else { continue };
        let mut plugins: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(|path| is_provider(path)).collect();
        plugins.sort();
        for plugin in plugins {
            // SAFETY: loading a plug-in runs its initialiser, which registers a provider. The operator who
            // sets the directory guarantees that it contains rdma-core.
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
    fn version_from_the_file_name() {
        let version = |name: &str| Version::of_file(Path::new(name)).map(|version| version.to_string());
        assert_eq!(version("/usr/lib/libibverbs.so.1.14.44.0").as_deref(), Some("44.0"));
        assert_eq!(version("libmana.so.1.0.65.2").as_deref(), Some("65.2"));
        for unknown in ["libmana.so", "libmana.so.1", "libmana.so.1.0.44", "libmana.so.1.x.44.0", "mana", "/", ""] {
            assert_eq!(version(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn only_plug_ins_count_as_providers() {
        assert!(is_provider(Path::new("/x/libmana-rdmav34.so")));
        for other in ["libmana.so.1", "libmana-rdmav34.so.1", "libmana-rdmav.so", "mana-rdmav34.so", "lib-rdmavx.so"] {
            assert!(!is_provider(Path::new(other)), "{other}");
        }
    }
}
