//! Set-up that the tests share.

use std::any::Any;
use std::ffi::OsStr;
use std::process::Command;
use std::sync::Arc;

use wirepath_memory::BufferAllocator;
use wirepath_verbs::mana::Mana;
use wirepath_verbs::*;

const TEST_CASE: &str = "WIREPATH_TEST_VERBS_CASE";

/// Returns true in the process that [`in_own_process`] started for the test `name`.
pub(crate) fn is_own_process(name: &str) -> bool {
    std::env::var(TEST_CASE).is_ok_and(|case| case == name)
}

/// Runs the test `name` again in a process of its own, with these environment variables. Returns `true` in that
/// process.
pub(crate) fn in_own_process<V: AsRef<OsStr>>(name: &str, environment: &[(&str, V)]) -> bool {
    if is_own_process(name) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(TEST_CASE, name);
    let output = command.envs(environment.iter().map(|(name, value)| (name, value))).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "there is no test named {name}:\n{text}");
    false
}

/// Returns the only device.
pub(crate) fn only_device() -> Device {
    let mut devices = Verbs::load().unwrap().devices().unwrap();
    assert_eq!(devices.len(), 1);
    devices.remove(0)
}

/// Opens the only device.
pub(crate) fn open() -> Context {
    only_device().open().unwrap()
}

/// Returns an RSS hash key.
pub(crate) fn key() -> [u8; 40] {
    std::array::from_fn(|index| index as u8 + 1)
}

/// MANA port with one queue in each direction.
pub(crate) struct ManaPort {
    pub(crate) buffers: Arc<BufferAllocator>,
    pub(crate) context: Context,
    pub(crate) mana: Mana,
    pub(crate) domain: ProtectionDomain,
    pub(crate) parent: ParentDomain,
    pub(crate) send_completions: CompletionQueue,
    pub(crate) receive_completions: CompletionQueue,
    pub(crate) pair: RawPacketQp,
    pub(crate) receive: WorkQueue,
    pub(crate) table: IndirectionTable,
    pub(crate) rss: RssQp,
}

impl ManaPort {
    /// Creates the queues in memory of `buffers`. Send requests have `segments` segments.
    pub(crate) fn create(context: Context, buffers: BufferAllocator, segments: u32) -> Result<Self> {
        let mana = Mana::from_context(&context)?;
        let buffers = Arc::new(buffers);
        mana.set_allocator(buffers.clone())?;
        let domain = ProtectionDomain::new(&context)?;
        let parent = mana.parent_domain(&domain, 1)?;
        let send_completions = CompletionQueue::new(&context, &CompletionQueueOptions::new(100, "send 0"))?;
        let receive_completions = CompletionQueue::new(&context, &CompletionQueueOptions::new(256, "receive 0"))?;
        let pair = RawPacketQp::new(&parent, &RawPacketQpOptions::send(&send_completions, 256, segments, "send 0"))?;
        let receive = WorkQueue::new(&parent, &WorkQueueOptions::new(&receive_completions, 256, "receive 0"))?;
        receive.start()?;
        let table = IndirectionTable::new(&[receive.clone(), receive.clone()])?;
        let rss = RssQp::new(&parent, &table, HashFields::IPV4, &key())?;
        Ok(Self {
            buffers,
            context,
            mana,
            domain,
            parent,
            send_completions,
            receive_completions,
            pair,
            receive,
            table,
            rss,
        })
    }

    /// Returns the handles in the order of their creation, except for the allocator.
    pub(crate) fn into_handles(self) -> Vec<Box<dyn Any>> {
        vec![
            Box::new(self.context),
            Box::new(self.mana),
            Box::new(self.domain),
            Box::new(self.parent),
            Box::new(self.send_completions),
            Box::new(self.receive_completions),
            Box::new(self.pair),
            Box::new(self.receive),
            Box::new(self.table),
            Box::new(self.rss),
        ]
    }
}

/// Drops the handles of a port in all rotations of the order of creation, forwards and backwards. Each handle is the
/// first once and the last once. All queue memory must be free after each rotation, and `check` runs then.
pub(crate) fn drop_in_every_order(create: impl Fn() -> ManaPort, check: impl Fn()) {
    for backwards in [false, true] {
        for rotation in 0..10 {
            let port = create();
            let buffers = Arc::clone(&port.buffers);
            let mut handles = port.into_handles();
            if backwards {
                handles.reverse();
            }
            handles.rotate_left(rotation);
            handles.into_iter().for_each(drop);
            check();
            assert_eq!(buffers.usage(), [], "rotation {rotation}, backwards {backwards}");
        }
    }
}
