-- Health of SharingPolicies and GPUMaintenances for Argo CD (docs/fleet.md). They have the conditions Reconciling and Stalled.
local function condition(type)
  for _, one in ipairs((obj.status or {}).conditions or {}) do
    if one.type == type and one.status == "True" then
      return one
    end
  end
end

local generation = (obj.status or {}).observedGeneration
if generation ~= nil and generation ~= obj.metadata.generation then
  return { status = "Progressing", message = "the change has not been read yet" }
end
local stalled, reconciling = condition("Stalled"), condition("Reconciling")
if stalled ~= nil then
  return { status = "Degraded", message = stalled.message }
end
if reconciling ~= nil then
  return { status = "Progressing", message = reconciling.message }
end
if (obj.status or {}).conditions == nil then
  return { status = "Progressing", message = "the object has not been read yet" }
end
return { status = "Healthy", message = "" }
