//! Handles of a context, and the dependencies between its objects.

use rustix::io::Errno;

use crate::device::ObjectId;

/// Maximum number of objects of a context.
const MOST: usize = 1 << 20;

/// Kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    Pd,
    Mr,
    Cq,
    Qp,
    Wq,
    Table,
    Flow,
    Matcher,
    FlowAction,
    Counters,
    FirmwareObject,
}

/// An object of the application.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) kind: ObjectKind,
    /// Number of the object in the device.
    pub(crate) id: ObjectId,
    /// Value that events of the object carry.
    pub(crate) user_handle: u64,
    /// Descriptor of the completion channel.
    pub(crate) channel: Option<i32>,
    /// Number of completion events and of other events sent so far.
    pub(crate) sent: (u32, u32),
    /// Handles of the objects that this one uses.
    dependencies: Vec<u32>,
    /// Number of objects that use this one.
    users: u32,
}

/// All objects of a context by handle. A new object gets the smallest free handle, as in the kernel.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    slots: Vec<Option<Object>>,
    /// All slots before this one are occupied.
    full_to: usize,
}

impl Objects {
    /// Adds an object and its dependencies; returns its handle.
    pub(crate) fn add(
        &mut self,
        kind: ObjectKind,
        id: ObjectId,
        user_handle: u64,
        channel: Option<i32>,
        dependencies: Vec<u32>,
    ) -> u32 {
        let handle = self.next();
        for &need in &dependencies {
            if let Some(object) = self.slots[need as usize].as_mut() {
                object.users += 1;
            }
        }
        let object = Some(Object { kind, id, user_handle, channel, sent: (0, 0), dependencies, users: 0 });
        if handle as usize == self.slots.len() {
            self.slots.push(object);
        } else {
            self.slots[handle as usize] = object;
        }
        self.full_to = handle as usize + 1;
        handle
    }

    /// Returns the handle that the next object gets.
    pub(crate) fn next(&self) -> u32 {
        let free = self.slots[self.full_to..].iter().position(Option::is_none);
        free.map_or(self.slots.len(), |at| self.full_to + at) as u32
    }

    /// Returns `ENOMEM` if there are too many objects.
    pub(crate) fn room(&self) -> Result<(), Errno> {
        if self.slots.len() < MOST { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Returns the object of a handle: `ENOENT` if there is none, `EINVAL` if it has another kind.
    pub(crate) fn get(&self, handle: u32, kind: ObjectKind) -> Result<&Object, Errno> {
        let object = self.slots.get(handle as usize).and_then(Option::as_ref).ok_or(Errno::NOENT)?;
        if object.kind == kind { Ok(object) } else { Err(Errno::INVAL) }
    }

    /// Returns the device's number of an object.
    pub(crate) fn id(&self, handle: u32, kind: ObjectKind) -> Result<ObjectId, Errno> {
        self.get(handle, kind).map(|object| object.id)
    }

    pub(crate) fn get_mut(&mut self, handle: u32) -> Option<&mut Object> {
        self.slots.get_mut(handle as usize)?.as_mut()
    }

    /// Removes an object; fails with `EBUSY` while other objects use it.
    pub(crate) fn remove(&mut self, handle: u32, kind: ObjectKind) -> Result<Object, Errno> {
        if self.get(handle, kind)?.users > 0 {
            return Err(Errno::BUSY);
        }
        let object = self.slots[handle as usize].take().ok_or(Errno::NOENT)?;
        self.full_to = self.full_to.min(handle as usize);
        for &need in &object.dependencies {
            if let Some(other) = self.slots[need as usize].as_mut() {
                other.users -= 1;
            }
        }
        Ok(object)
    }

    /// Returns true if another object uses this one.
    pub(crate) fn is_used(&self, handle: u32) -> bool {
        self.slots.get(handle as usize).and_then(Option::as_ref).is_some_and(|object| object.users > 0)
    }

    /// Returns true if an object reports to this channel.
    pub(crate) fn uses_channel(&self, channel: i32) -> bool {
        self.slots.iter().flatten().any(|object| object.channel == Some(channel))
    }

    /// Removes and returns all objects; objects come before those that they use.
    pub(crate) fn drain(&mut self) -> Vec<Object> {
        let mut all = Vec::new();
        while self.slots.iter().any(Option::is_some) {
            for handle in 0..self.slots.len() as u32 {
                if let Some((kind, 0)) = self.slots[handle as usize].as_ref().map(|object| (object.kind, object.users))
                {
                    all.extend(self.remove(handle, kind));
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_objects_cannot_be_removed() {
        let mut objects = Objects::default();
        let pd = objects.add(ObjectKind::Pd, 7, 0, None, vec![]);
        let mr = objects.add(ObjectKind::Mr, 1, 0, None, vec![pd]);
        assert_eq!(objects.remove(pd, ObjectKind::Pd).unwrap_err(), Errno::BUSY);
        assert_eq!(objects.remove(pd, ObjectKind::Mr).unwrap_err(), Errno::INVAL);
        assert_eq!(objects.remove(99, ObjectKind::Pd).unwrap_err(), Errno::NOENT);
        objects.remove(mr, ObjectKind::Mr).unwrap();
        assert_eq!(objects.remove(pd, ObjectKind::Pd).unwrap().id, 7);
        assert_eq!(objects.add(ObjectKind::Pd, 1, 0, None, vec![]), 0, "the smallest free number");
    }

    #[test]
    fn drain_returns_users_first() {
        let mut objects = Objects::default();
        let pd = objects.add(ObjectKind::Pd, 0, 0, None, vec![]);
        let cq = objects.add(ObjectKind::Cq, 0, 0, None, vec![]);
        let wq = objects.add(ObjectKind::Wq, 0, 0, None, vec![pd, cq]);
        let table = objects.add(ObjectKind::Table, 0, 0, None, vec![wq, wq]);
        objects.add(ObjectKind::Qp, 0, 0, None, vec![pd, table]);
        let kinds: Vec<ObjectKind> = objects.drain().iter().map(|object| object.kind).collect();
        let at = |kind| kinds.iter().position(|k| *k == kind).unwrap();
        assert!(
            at(ObjectKind::Qp) < at(ObjectKind::Table)
                && at(ObjectKind::Table) < at(ObjectKind::Wq)
                && at(ObjectKind::Wq) < at(ObjectKind::Cq)
        );
    }
}
