//! Pages of virtio doorbells (VAR, mlx5dv_alloc_var(3)). Programs map these objects, name them in firmware
//! commands and pass them to virtual machines. Source: Linux drivers/infiniband/hw/mlx5/main.c,
//! `MLX5_IB_METHOD_VAR_OBJ_ALLOC`.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::mlx5 as abi;
use zerocopy::IntoBytes;

use super::{Mlx5, OBJECT_PAGES, PAGE, PAGES};
use crate::attributes::Attributes;
use crate::device::{Call, ContextId};
use crate::host::Host;

/// Maximum number of pages of a context.
pub(super) const VARS: usize = 4;
/// Number of the first page in firmware commands.
const FIRST_ID: u32 = 0x100;

impl<H: Host> Mlx5<H> {
    /// Returns true if a page is allocated; pages are counted from the first doorbell page.
    pub(super) fn has_var(&self, context: ContextId, page: usize) -> bool {
        let Some(var) = page.checked_sub(PAGES) else { return false };
        let used = |context: &super::UserContext| context.vars.get(var).is_some_and(|used| *used || context.imported);
        self.contexts.get(&context).is_some_and(used)
    }

    pub(super) fn var_alloc(&mut self, call: &Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        let known = [abi::VAR_ALLOC_HANDLE, abi::VAR_ALLOC_OFFSET, abi::VAR_ALLOC_LENGTH, abi::VAR_ALLOC_PAGE_ID];
        // Mandatory flags of later kernels are refused.
        attributes.check_known(&known)?;
        let context = self.contexts.get_mut(&call.context).filter(|context| !context.imported).ok_or(Errno::INVAL)?;
        let Some(var) = context.vars.iter().position(|used| !used) else {
            let why = format!("{}: all {VARS} pages of virtio doorbells are in use", self.spec.name);
            return Err(call.refuse(Errno::NOSPC, why));
        };
        context.vars[var] = true;
        let offset = (OBJECT_PAGES + (PAGES + var) as u64) * PAGE;
        attributes.put_handle(abi::VAR_ALLOC_HANDLE, var as u64);
        attributes.put(abi::VAR_ALLOC_OFFSET, offset.as_bytes())?;
        attributes.put(abi::VAR_ALLOC_LENGTH, (PAGE as u32).as_bytes())?;
        attributes.put(abi::VAR_ALLOC_PAGE_ID, (FIRST_ID + var as u32).as_bytes())
    }

    pub(super) fn var_destroy(&mut self, call: &Call<'_, H>, attributes: &Attributes<'_, H>) -> Result<(), Errno> {
        let var = attributes.handle(abi::VAR_DESTROY_HANDLE).ok_or(Errno::INVAL)? as usize;
        let context = self.contexts.get_mut(&call.context).ok_or(Errno::INVAL)?;
        let used = context.vars.get_mut(var).filter(|used| **used).ok_or(Errno::NOENT)?;
        *used = false;
        Ok(())
    }
}
